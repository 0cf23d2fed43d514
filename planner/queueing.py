"""How many workers a load needs so that enough requests are in time: by queueing theory. Pure."""

from __future__ import annotations

import math

_MOST = 4096


def prefill_workers(
    load: float, service_s: float, scv: float, wait_s: float, late: float, utilisation: float
) -> int:
    """The fewest servers with which at most a share `late` of prompts waits longer than `wait_s`.

    `load`: seconds of computing that come in a second (erlangs). `service_s`: of a prompt on average. `scv`:
    squared coefficient of variation of that. `utilisation`: most of a server's time that may be busy.
    The chance of waiting in M/M/n is near rho^(sqrt(2(n+1)) - 1) (Sakasegawa, "An approximation formula
    L = alpha rho^beta / (1 - rho)", 1977), and a wait, where there is one, is about exponential with mean
    service_s (1 + scv) / 2 / (n (1 - rho)) (Allen and Cunneen; heavy traffic).
    """
    if load <= 0:
        return 0
    least = max(1, math.ceil(load / utilisation - 1e-9))
    mean_s = service_s * (1 + scv) / 2
    for servers in range(least, _MOST):
        rho = load / servers
        waits = rho ** (math.sqrt(2 * (servers + 1)) - 1)
        longer = math.exp(-max(0.0, wait_s) * servers * (1 - rho) / mean_s) if mean_s > 0 else 0.0
        if waits * longer <= late or (wait_s <= 0 and rho <= utilisation / 2):
            return servers
    return _MOST


def decode_workers(sequences: float, batch: float, late: float) -> int:
    """The fewest servers of `batch` sequences each that have room for all in progress but a share `late` of
    the time. Of answers that are not kept waiting, the number in progress is Poisson with mean `sequences`
    (M/G/infinity), here by its normal approximation: square-root staffing (Halfin and Whitt, 1981)."""
    if sequences <= 0:
        return 0
    return max(1, math.ceil((sequences + _quantile(late) * math.sqrt(sequences)) / batch - 1e-9))


def _quantile(late: float) -> float:
    """Standard normal, exceeded with that chance; Abramowitz and Stegun 26.2.22, within 0.003."""
    t = math.sqrt(-2 * math.log(min(max(late, 1e-9), 0.5)))
    return t - (2.30753 + 0.27061 * t) / (1 + 0.99229 * t + 0.04481 * t * t)


def aggregated_workers(
    load: float, sequences: float, base_s: float, each_s: float, tpot_s: float, utilisation: float
) -> int | None:
    """The fewest workers that do both on the same steps: prompts take a share of each one's time, and stretch
    the time between tokens of all its sequences by it. None: no number of them meets `tpot_s`."""
    if load <= 0 and sequences <= 0:
        return 0
    for workers in range(1, _MOST):
        share = load / workers
        if share < utilisation and (base_s + each_s * sequences / workers) / (1 - share) <= tpot_s:
            return workers
    return None
