"""Send the metrics of a run to experiment trackers: Weights & Biases, MLflow and Trackio.

All work offline: with WANDB_MODE=offline a run is written to its workdir, for `wandb sync`; MLflow writes to
a folder or a server (MLFLOW_TRACKING_URI), Trackio (huggingface.co/docs/trackio) to a database of the
user (TRACKIO_DIR). A resumed run continues the same tracker run.
"""

import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from bert_jax import storage
from bert_jax.config.fields import flatten
from bert_jax.config.schema import TrainConfig
from bert_jax.errors import UserError, missing

PROJECT = "bert_jax"
# Give up after about two minutes if a server does not answer. By default MLflow, for which a run waits
# at every step that is logged, gives up after 20 minutes, and W&B at the end of a run after hours.
_LIMITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5",
    "WANDB_FINISH_TIMEOUT": "120",
    "WANDB_FINISH_TIMEOUT_RAISES": "true",
}


@runtime_checkable
class Tracker(Protocol):
    """Where metrics of a run are sent."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step, by names such as train/loss."""
        ...

    def close(self, failed: bool) -> None:
        """Send what is left, and mark the run as finished, or as failed."""
        ...


def open_trackers(
    config: TrainConfig, folder: pathlib.Path, run: str, devices: str
) -> dict[str, Tracker]:
    """Open the trackers of `config.trackers`, by name; a run that resumes keeps its identity `run`."""
    makers: dict[str, Callable[..., Tracker]] = {
        "wandb": _Wandb,
        "mlflow": _MLflow,
        "trackio": _Trackio,
    }
    settings = {**flatten(config), "devices": devices}
    trackers = {}
    for name in config.trackers:
        for variable, value in _LIMITS.items():
            os.environ.setdefault(variable, value)
        try:
            trackers[name] = makers[name](settings, folder, run)
        except ImportError as error:
            raise missing(f"config.trackers: {name} is not installed", name) from error
        except UserError:
            raise
        except Exception as error:  # packages of others raise what they like
            text = " ".join(str(error).split())[:200]
            offline = {
                "wandb": "WANDB_MODE=offline",
                "mlflow": "MLFLOW_TRACKING_URI=file:mlruns",
                "trackio": "TRACKIO_DIR=trackio without TRACKIO_SPACE_ID",
            }
            raise UserError(
                f"config.trackers: {name} does not start ({text}); {offline[name]} needs no server"
            ) from error
    return trackers


class _Wandb:
    def __init__(self, settings: dict[str, Any], folder: pathlib.Path, run: str):
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run,
            name=os.environ.get("WANDB_NAME", folder.name),
            dir=folder,
            resume="allow",
            config=settings,
            settings=wandb.Settings(silent=True),
        )
        # Not wandb's own count, which cannot go back as a run that is resumed does.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MLflow:
    def __init__(self, settings: dict[str, Any], folder: pathlib.Path, run: str):
        import mlflow  # pyright: ignore[reportMissingImports]

        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri and storage.remote(folder):
            raise UserError("mlflow needs MLFLOW_TRACKING_URI for a workdir on object storage")
        # Runs in folders beside each other are compared.
        uri = uri or f"sqlite:///{folder.absolute().parent / 'mlflow.db'}"
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([number], f"tags.bert_jax_run = '{run}'")
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"bert_jax_run": run}
        self._id = self._client.create_run(number, run_name=folder.name, tags=tags).info.run_id
        parameters = [self._entities.Param(key.replace("[", ".").replace("]", ""), str(value)[:500]) for key, value in settings.items()]  # fmt: skip
        for begin in range(0, len(parameters), 100):  # maximum per request
            self._client.log_batch(self._id, params=parameters[begin : begin + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name, float(x), now, step) for name, x in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


class _Trackio:
    def __init__(self, settings: dict[str, Any], folder: pathlib.Path, run: str):
        import trackio  # pyright: ignore[reportMissingImports]

        # Runs resume by their name.
        options = {"resume": "allow", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        name = f"{folder.name}-{run[:8]}"
        self._run = trackio.init(PROJECT, name=name, config=settings, **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()
