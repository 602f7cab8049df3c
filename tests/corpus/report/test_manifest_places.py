"""Names of dropped documents in the manifest are places in the inputs, whatever the inputs were cut into meanwhile."""

import json

from lazyformer_fairseq.corpus.report.manifest import gather_notes
from lazyformer_fairseq.corpus.run.stages import WorkPaths
from lazyformer_fairseq.corpus.words.word_store import NOTES_FILE


def write_notes(folder, documents: dict[str, int], dropped: list[str]) -> None:
    folder.mkdir(parents=True)
    notes = {"examples": {}, "dropped": {"too short": dropped}, "documents": documents}
    (folder / NOTES_FILE).write_text(json.dumps(notes))


def test_documents_of_a_cut_file_are_named_by_their_number_in_it(tmp_path):
    paths = WorkPaths(tmp_path)
    first, second = (f"{tmp_path}/cut/00000/part-0000{number}.xml.zst" for number in (0, 1))
    write_notes(paths.store(0), {"a.txt": 3, first: 40}, ["a.txt:2", f"{first}:7"])
    write_notes(paths.store(1), {second: 5}, [f"{second}:3", f"{second}, line 9: malformed XML"])
    _, names, documents = gather_notes(paths, 2, {first: "dump.xml.bz2", second: "dump.xml.bz2"})
    assert names["too short"] == [
        *("a.txt:2", "dump.xml.bz2:7", "dump.xml.bz2:43"),
        "dump.xml.bz2, a part of it, line 9: malformed XML",
    ]
    assert documents == {"a.txt": 3, "dump.xml.bz2": 45}
