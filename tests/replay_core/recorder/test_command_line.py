from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay_core.recorder import Recorder
from replay_core.recorder.command_line import REDACTED, as_kept, redacted

#: No value of these may be in a dump; what of a line says nothing secret stays.
SECRET = "Zq9kLw3Xv7Rt2Np8"
LINES = [
    ["--hub_token", f"hf_{SECRET}{SECRET}"],
    ["--hub-token=" + SECRET],
    ["--hubToken", SECRET],
    ["--api-key", SECRET],
    ["--openai_api_key=" + SECRET],
    ["--password", SECRET],
    ["--db-password=12345"],
    ["--client-secret", SECRET],
    ["--auth", SECRET],
    ["wandb.api_key=" + SECRET],
    ["+trainer.wandb.key=" + SECRET],
    ["WANDB_API_KEY=" + SECRET],
    ["--env", f"HF_TOKEN={SECRET},LR=1"],
    ['{"api_key": "' + SECRET + '", "lr": 1}'],
    ["--header", f"Authorization: Bearer {SECRET}"],
    ["--header", f"Bearer {SECRET}"],
    [f"https://user:{SECRET}@host/data"],
    [f"postgresql://me:{SECRET}@db:5432/runs"],
    [f"https://{SECRET}@github.com/me/repo"],
    [f"https://host/data?token={SECRET}&split=train"],
    [f"s3://bucket/data?X-Amz-Signature={SECRET}"],
    ["sk-proj-" + SECRET + SECRET],
    ["ghp_" + SECRET + SECRET],
    ["AKIA" + "ABCDEFGHIJKLMNOP"],
    ["0123456789abcdef0123456789abcdef01234567"],
    ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0." + SECRET],
    ["https://hooks.slack.com/services/T0/B0/" + SECRET],
    ["-----BEGIN RSA PRIVATE KEY-----\n" + SECRET],
]
PLAIN = [
    "--lr", "1e-5", "--max-tokens", "512", "--max_tokens=512", "--eos_token", "</s>", "--pad_token_id=0", "--tokenizer",
    "Qwen/Qwen2.5-0.5B-Instruct", "data.prompt_key=prompt", "algorithm.reward_key=score", "--token-level", "sum",
    "--model_name_or_path", "/data/models/step_002000/actor", "trainer.logger=[console,wandb]", "--use_auth_token=true",
    "https://huggingface.co/datasets/openai/gsm8k", "--run-name", "grpo-qwen2.5-2026-11-22-lr1e-5", "git@github.com:me",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0][:24])
def test_what_looks_like_a_secret_is_not_kept(line: list[str]) -> None:
    kept = as_kept(["train.py", *line, "--seed", "3"])
    assert kept[0] == "train.py"
    assert kept[-2:] == ["--seed", "3"]
    assert REDACTED in " ".join(kept)
    for secret in (SECRET, "12345", "ABCDEFGHIJKLMNOP", "89abcdef"):
        assert secret not in " ".join(kept)


def test_what_is_no_secret_is_kept_as_it_was() -> None:
    assert as_kept(["train.py", *PLAIN]) == ["train.py", *PLAIN]


def test_nothing_of_a_manifest_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in LINES:
        monkeypatch.setattr("sys.argv", ["train.py", *line])
        directory = tmp_path / str(LINES.index(line))
        with Recorder(directory) as recorder:
            recorder.note_model(0, f"https://user:{SECRET}@host/weights")
            recorder.note(incident={"what": f"no answer from https://user:{SECRET}@host", "step": 0})
        text = (directory / "manifest.json").read_text()
        assert SECRET not in text
        assert text.count("train.py") == 1
    manifest = json.loads(text)
    assert manifest["models"] == {"0": f"https://user:{REDACTED}@host/weights"}


def test_a_digest_is_no_secret() -> None:
    content = {"config_hash": "0123456789abcdef" * 4, "weights": "sha256:0123456789abcdef0123456789abcdef", "seed": 3}
    assert redacted(content) == content
