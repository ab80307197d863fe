"""vLLM's engine on command: a JSON request per line on stdin, a JSON answer per line on stdout.

Runs on the Python that has vLLM; `engine.Engine` starts it.  The first line holds the engine's arguments.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

STEP_TIMEOUT_S = 300.0


class Driver:
    """An engine and what can be asked of it: each method without an underscore is a verb."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        vllm: Any = importlib.import_module("vllm")
        self._params: Callable[..., Any] = vllm.SamplingParams
        self._make: Callable[..., Any] = vllm.LLM
        self._llm: Any = self._make(**arguments)
        self._number = 0

    def generate(self, prompts: list[dict[str, Any]], **params: Any) -> list[dict[str, Any]]:
        """All prompts at once, greedily.  A prompt is what vLLM takes: prompt_token_ids or prompt, cache_salt, ..."""
        outputs = self._llm.generate(prompts, self._sampling(params), use_tqdm=False)
        return [_described(output) for output in outputs]

    def reopen(self, **arguments: Any) -> str:
        """End this engine and start another one in the same process, which is much faster than a new process."""
        state: Any = importlib.import_module("vllm.distributed.parallel_state")
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        state.cleanup_dist_env_and_memory()
        self._llm = self._make(**arguments)
        return "ready"

    def until_hit(self, prompt: dict[str, Any]) -> int:
        """Ask the same until a part of it is cached; how often that was."""
        deadline = time.monotonic() + STEP_TIMEOUT_S
        for count in range(1, 1_000_000):
            if self.generate([prompt])[0]["cached_tokens"]:
                return count
            if time.monotonic() > deadline:
                raise TimeoutError("nothing is ever cached")
        raise AssertionError("not reached")

    def metrics(self) -> dict[str, float]:
        """vLLM's Prometheus counters."""
        return {found.name: found.value for found in self._llm.get_metrics() if hasattr(found, "value")}

    def corrupt(self, on: bool) -> None:
        """From now on whatever is loaded into the engine is zeros, in an engine of one process."""
        kind: Any = importlib.import_module("lmcache_core.devices.cpu").CpuDevice
        if not hasattr(kind, "real_scatter"):
            kind.real_scatter = kind.scatter

        def scatter(device: Any, src: Any, *arguments: Any, **options: Any) -> Any:
            return device.real_scatter([memoryview(bytes(len(each))) for each in src], *arguments, **options)

        kind.scatter = scatter if on else kind.real_scatter

    def call(self, name: str, **arguments: Any) -> Any:
        """A method of vllm.LLM, such as reset_prefix_cache or sleep."""
        answer = getattr(self._llm, name)(**arguments)
        return answer if isinstance(answer, bool | int | float | str | list | dict) else None

    def abort(self, prompt: dict[str, Any], *, after_steps: int, **params: Any) -> list[dict[str, Any]]:
        """Start a request, abort it after so many steps of the engine, and step until nothing is left; its outputs."""
        engine = self._llm.llm_engine
        name = self._name()
        engine.add_request(name, prompt, self._sampling(params))
        seen = []
        for _ in range(after_steps):
            seen += engine.step()
        engine.abort_request([name])
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while engine.has_unfinished_requests():
            if time.monotonic() > deadline:
                raise TimeoutError("the engine does not come to an end after an abort")
            seen += engine.step()
        return [_described(output) for output in seen]

    def converse(
        self, *, conversations: int, turns: int, opening_tokens: int, turn_tokens: int, answer_tokens: int,
        limit_s: float, seed: int, vocabulary: int = 40_000,
    ) -> dict[str, Any]:  # fmt: skip
        """Many conversations at once, for `limit_s`: the next turn of each follows its last answer at once.

        A turn's prompt is all that was said before and `turn_tokens` new ones.  One that had all its turns begins
        anew with other tokens.  Answers with one entry per request that was completed in time.
        """
        engine = self._llm.llm_engine
        params = self._sampling({"max_tokens": answer_tokens})
        words = random.Random(seed)
        done: list[dict[str, Any]] = []
        talks = {each: Talk(words, opening_tokens, turn_tokens, vocabulary) for each in range(conversations)}
        running: dict[str, int] = {}
        began = time.monotonic()

        def ask(each: int) -> None:
            name = self._name()
            running[name] = each
            engine.add_request(name, {"prompt_token_ids": list(talks[each].said)}, params)

        for each in talks:
            ask(each)
        while time.monotonic() - began < limit_s:
            for output in engine.step():
                if not output.finished:
                    continue
                each = running.pop(output.request_id)
                found = _described(output)
                answer = found.pop("tokens")
                size = {"prompt_tokens": len(talks[each].said), "turn": talks[each].turn}
                done.append(found | size | {"at_s": time.monotonic() - began})
                talks[each].next(answer)
                if talks[each].turn == turns:
                    talks[each] = Talk(words, opening_tokens, turn_tokens, vocabulary)
                ask(each)
        seconds = time.monotonic() - began
        engine.abort_request(list(running))
        while engine.has_unfinished_requests():
            engine.step()
        return {"completed": done, "seconds": seconds}

    def stop(self) -> None:
        """End the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown()

    def _name(self) -> str:
        self._number += 1
        return f"r{self._number}"

    def _sampling(self, params: dict[str, Any]) -> Any:
        return self._params(**{"temperature": 0, "ignore_eos": True, "max_tokens": 1, **params})


class Talk:
    """One conversation: all tokens that were said."""

    def __init__(self, words: random.Random, opening_tokens: int, turn_tokens: int, vocabulary: int) -> None:
        self.words = random.Random(words.random())
        self.turn_tokens = turn_tokens
        self.vocabulary = vocabulary
        self.said = self._speak(opening_tokens)
        self.turn = 0

    def next(self, answer: list[int]) -> None:
        self.said += answer + self._speak(self.turn_tokens)
        self.turn += 1

    def _speak(self, count: int) -> list[int]:
        return [self.words.randrange(100, self.vocabulary) for _ in range(count)]


def _described(output: Any) -> dict[str, Any]:
    """One request's output as JSON can hold it."""
    (first,) = output.outputs
    described: dict[str, Any] = {
        "tokens": list(first.token_ids),
        "finish": first.finish_reason,
        "cached_tokens": output.num_cached_tokens,
        "ttft_s": output.metrics.first_token_latency if output.metrics else None,
        "kv_transfer_params": output.kv_transfer_params,
    }
    if first.logprobs:
        chosen = zip(first.token_ids, first.logprobs, strict=True)
        described["logprobs"] = [found[token].logprob for token, found in chosen]
    return described


def main() -> None:
    # Whatever vLLM prints goes to the log; answers leave through a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        driver = Driver(json.loads(sys.stdin.readline()))
    except Exception:
        reply({"error": traceback.format_exc()})
        return
    reply({"answer": "ready"})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply({"answer": getattr(driver, request.pop("verb"))(**request)})
        except Exception:
            reply({"error": traceback.format_exc()})


if __name__ == "__main__":  # vLLM's own processes import this file again
    main()
