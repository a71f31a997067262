"""The experiment tracker that the answers chose, kept inside the run folder where it can be."""

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from .config import TrainConfig, to_dict


def prepare_tracker(tracker: str, run_dir: Path) -> None:
    """Point the tracker's library at the run folder. Call before it is imported.

    Variables that are set already win, so a server of yours is used when you name it.
    """
    if tracker == "wandb":
        # Without a key there is nobody to ask: keep the run for `wandb sync`.
        if not os.environ.get("WANDB_API_KEY") and not Path("~/.netrc").expanduser().exists():
            os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_DIR", str(run_dir))
        os.environ.setdefault("WANDB_SILENT", "true")
    elif tracker == "mlflow":
        database = run_dir.absolute().parent / "mlflow.db"
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    elif tracker == "trackio":
        os.environ.setdefault("TRACKIO_DIR", str(run_dir.absolute().parent / "trackio"))


def start_tracker(
    accelerator: Accelerator, tracker: str, project: str, config: TrainConfig
) -> None:
    """Begin or continue the run's record. Collective."""
    if tracker == "none":
        return
    run = config.run_name
    mlflow_id = config.run_dir / "mlflow_run_id"  # MLflow knows runs by numbers of its own
    known = mlflow_id.read_text(encoding="utf-8") if mlflow_id.exists() else None
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {},
        "wandb": {"name": run, "id": run, "resume": "allow"},
        "mlflow": {"run_name": run, "run_id": known},
        "trackio": {"name": run, "resume": "allow"},
    }
    # TensorBoard would file the values as one more run at each start, and MLflow refuses changed
    # ones; config.yaml has them.
    stored = None if tracker == "tensorboard" or known else to_dict(config)
    accelerator.init_trackers(
        "tensorboard" if tracker == "tensorboard" else project,
        config=stored,
        init_kwargs={tracker: options[tracker]},
    )
    if tracker == "mlflow" and accelerator.is_main_process:
        mlflow_id.write_text(accelerator.get_tracker("mlflow", unwrap=True).info.run_id, "utf-8")
