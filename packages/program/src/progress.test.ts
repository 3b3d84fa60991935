import { afterEach, expect, test, vi } from "vitest";
import { showProgress } from "./progress.js";

afterEach(() => vi.useRealTimers());

test("first-contact.md 8: a run shows what it has done after 3 s, and a shorter one nothing", () => {
  vi.useFakeTimers();
  const lines: string[] = [];
  let done = 0;
  {
    using _ = showProgress(
      "kv-peer",
      () => `${done} of 9`,
      (text) => void lines.push(text),
    );
    vi.advanceTimersByTime(2_900);
    expect(lines).toEqual([]);
    done = 4;
    vi.advanceTimersByTime(3_200);
  }
  vi.advanceTimersByTime(9_000);
  expect(lines).toEqual(["kv-peer: 4 of 9, 3 s\n", "kv-peer: 4 of 9, 6 s\n"]);
});
