"""The record that fairseq's loop writes: run.json and metrics.jsonl, over a stop and a resumption."""

from lazyformer_fairseq.training.run_record import read_metrics, read_run

OPTIONS = (
    "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4 --lr 1e-3 "
    "--warmup-ratio 0.01 --tokens-per-sample 32 --log-interval 2 --log-format none --validate-interval-updates 4 "
    "--max-valid-steps 2 --seed 3 --max-update "
)


def test_a_run_of_fairseqs_loop_has_a_record(data_folder, tmp_path, fairseq_train):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    fairseq_train(data_folder, f"{OPTIONS} 8", whole)
    for updates in (5, 8):
        fairseq_train(data_folder, f"{OPTIONS} {updates}", resumed)

    run = read_run(whole)
    assert (run.model["name"], run.model["sublayer_pattern"]) == ("lazyformer_m2x6_s_tiny", "M2")
    assert (run.schedule["max_update"], run.batch["batch_size"], run.precision, run.seed) == (8, 4, "fp32", 3)
    assert run.task["tokens_per_sample"] == 32 and any(path.endswith("dict.txt") for path in run.data)

    lines = read_metrics(whole)
    assert [line.updates for line in lines if line.split == "valid"] == [4, 8]
    intervals = [line for line in lines if line.split == "train"]
    assert [line.updates for line in intervals] == [2, 4, 6, 8]
    assert all(line.values["loss"] > 0 and line.epoch == 1 for line in intervals)
    assert intervals[0].values["lr"] > intervals[-1].values["lr"] == 0
    assert [line.updates for line in read_metrics(resumed, "valid")] == [4, 5, 8]
    assert read_run(resumed).schedule["max_update"] == 8
