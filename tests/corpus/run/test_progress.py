"""Progress goes through files and never counts a byte twice."""

from lazyformer_fairseq.corpus.run.progress import TaskProgress, bytes_done, progress_bar


def folders(tmp_path):
    for name in ("completions", "progress"):
        (tmp_path / name).mkdir()
    return tmp_path / "completions", tmp_path / "progress"


def test_finished_tasks_and_those_under_way(tmp_path):
    completions, progress = folders(tmp_path)
    sizes = [100, 200, 300]
    assert bytes_done(sizes, completions, progress) == 0
    TaskProgress(progress)(1, 50)
    TaskProgress(progress)(2, 999)  # what is read ahead does not count
    assert bytes_done(sizes, completions, progress) == 350
    (completions / "00001").touch()
    assert bytes_done(sizes, completions, progress) == 500


def test_reports_are_few(tmp_path):
    _, progress = folders(tmp_path)
    report = TaskProgress(progress)
    for done in range(1000):
        report(0, done)
    assert int((progress / "00000").read_text()) < 999


def test_the_bar_ends_full(tmp_path, capsys):
    completions, progress = folders(tmp_path)
    with progress_bar("words", [3, 4], completions, progress, in_bytes=True):
        for rank in range(2):
            (completions / f"{rank:05d}").touch()
    assert not capsys.readouterr().out
