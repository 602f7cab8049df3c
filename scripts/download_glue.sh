#!/usr/bin/env bash
# Downloads the GLUE tasks from the locations to which gluebenchmark.com links.
set -euo pipefail
# shellcheck source=scripts/prepare_text.sh
source "$(dirname "$0")/prepare_text.sh"

usage() {
  cat <<'HELP'
usage: scripts/download_glue.sh FOLDER [options]

Downloads GLUE (Wang et al., 2018) for `lazyformer finetune --data FOLDER`, with one folder per task. The archives take
about 500 MB and are kept in FOLDER.download. MRPC is assembled from Microsoft's two files and GLUE's list of
development examples, as in GLUE's own script. You can stop it at any time and run the same command again to resume.
Prints the size, number of rows and SHA-256 of each file. No checksums are published, so compare the output with that of
another download.
Each task has its own terms of use: https://gluebenchmark.com/tasks

options (defaults in brackets)
  --tasks 'A B'   the tasks to download [CoLA SST-2 MRPC STS-B QQP MNLI QNLI RTE WNLI AX]
  --url URL       URL of the files [https://dl.fbaipublicfiles.com]
  --dry-run       print what would be downloaded without downloading it
  --help
HELP
}

# files TASK: print the paths of the task's files, relative to the URL.
files() {
  case $1 in
  QQP) echo glue/data/QQP-clean.zip ;;
  QNLI) echo glue/data/QNLIv2.zip ;;
  AX) echo glue/data/AX.tsv ;;
  MRPC)
    printf '%s\n' senteval/senteval_data/msr_paraphrase_{train,test}.txt glue/data/mrpc_dev_ids.tsv
    ;;
  *) echo "glue/data/$1.zip" ;;
  esac
}

# unpack TASK: unpack the downloaded files to the task's folder, which exists only once it is complete.
unpack() {
  "$python" -S -E -B - "$1" "$downloads" "$folder" "$(dirname "$0")" <<'PYTHON'
import os, re, shutil, sys
from pathlib import Path

task, downloads, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
sys.path.insert(0, sys.argv[4])
from unpack_zip import unpack

out = folder / ("diagnostic" if task == "AX" else task)
unfinished = out.with_name(f".{out.name}.unfinished")
shutil.rmtree(unfinished, ignore_errors=True)
unfinished.mkdir(parents=True)


def rows(name):
    with (downloads / name).open(encoding="utf-8-sig", newline="") as file:
        yield from (line.rstrip("\r\n").split("\t") for line in file)


def write(name, lines):
    with (unfinished / name).open("w", encoding="utf-8", newline="") as file:
        file.writelines("\t".join(line) + "\n" for line in lines)


if task == "AX":
    shutil.copy(downloads / "AX.tsv", unfinished / "diagnostic.tsv")
elif task == "MRPC":
    held_out = {tuple(line) for line in rows("mrpc_dev_ids.tsv")}
    header, *given = rows("msr_paraphrase_train.txt")
    write("dev.tsv", [header, *(line for line in given if tuple(line[1:3]) in held_out)])
    write("train.tsv", [header, *(line for line in given if tuple(line[1:3]) not in held_out)])
    header, *given = rows("msr_paraphrase_test.txt")
    write("test.tsv", [["index", *header[1:]], *([str(number), *line[1:]] for number, line in enumerate(given))])
else:
    name = {"QQP": "QQP-clean", "QNLI": "QNLIv2"}.get(task, task)
    # Skip the other folders of the archive.
    is_table = re.compile(rf"{re.escape(task)}/[^/]+\.tsv").fullmatch
    unpacked = unpack(downloads / f"{name}.zip", unfinished / "unpacked", lambda member: is_table(member) is not None)
    if not unpacked:
        sys.exit(f"{name}.zip does not contain any {task}/*.tsv")
    for file in unpacked:
        file.rename(unfinished / file.name)
    shutil.rmtree(unfinished / "unpacked")
shutil.rmtree(out, ignore_errors=True)
os.replace(unfinished, out)
PYTHON
}

# Print the size, number of rows and SHA-256 of each file. The header line, which all files except two of CoLA's have,
# is not counted as a row.
tell() {
  "$python" -S -E - "$@" <<'PYTHON'
import hashlib, sys
from pathlib import Path

for path in sorted(path for folder in sys.argv[1:] for path in Path(folder).glob("*.tsv")):
    digest, lines = hashlib.sha256(), 0
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            lines += 1
    lines -= not (path.parent.name == "CoLA" and path.name in ("train.tsv", "dev.tsv"))
    print(f"{path.parent.name}/{path.name}: {path.stat().st_size:,} bytes, {lines:,} rows, SHA-256 {digest.hexdigest()}")
PYTHON
}

help_if_asked "$@"
[[ $1 != -* ]] || fail 2 "pass FOLDER first; see scripts/download_glue.sh --help"
folder=${1%/}
shift
all='CoLA SST-2 MRPC STS-B QQP MNLI QNLI RTE WNLI AX' tasks='' url=https://dl.fbaipublicfiles.com dry_run=''
while [[ $# -gt 0 ]]; do
  case $1 in
  --tasks | --url)
    [[ $# -ge 2 ]] || fail 2 "$1 needs a value"
    if [[ $1 == --url ]]; then url=${2%/}; else tasks=$2; fi
    shift 2
    ;;
  --dry-run) dry_run=yes && shift ;;
  *) fail 2 "$1: no such option; see scripts/download_glue.sh --help" ;;
  esac
done
for task in ${tasks:=$all}; do
  [[ " $all " == *" $task "* ]] || fail 2 "--tasks $task: use one or more of $all, separated by spaces"
done
python=$(command -v python3) || fail 1 "python3 was not found; install it"
downloads=$folder.download folders=()
for task in $tasks; do
  own=$folder/$task
  [[ $task != AX ]] || own=$folder/diagnostic
  folders+=("$own")
  [[ ! -d $own ]] || continue
  for file in $(files "$task"); do
    if [[ -n $dry_run ]]; then
      echo "would download $url/$file to $downloads/${file##*/}" >&2
    elif [[ ! -e $downloads/${file##*/} ]]; then
      download "$url/$file" "$downloads/${file##*/}"
    fi
  done
  [[ -n $dry_run ]] || unpack "$task" ||
    fail 1 "$downloads: $task cannot be unpacked; remove its files from this folder and run this again"
done
[[ -z $dry_run ]] || exit 0
tell "${folders[@]}"
echo "Next: lazyformer finetune CHECKPOINT --task glue --data $(printf '%q' "$folder") --output RESULTS"
