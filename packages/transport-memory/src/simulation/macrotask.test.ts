import { afterEach, expect, test, vi } from "vitest";
import { macrotaskTurn } from "./virtual-clock.js";

afterEach(() => vi.unstubAllGlobals());

/**
 * The globals that a runtime may lack: browsers have no setImmediate, some have no MessageChannel.
 */
const LACKING = [[], ["setImmediate"], ["setImmediate", "MessageChannel"]];

test("a turn ends after all promise work, with or without setImmediate and MessageChannel", async () => {
  for (const missing of LACKING) {
    for (const name of missing) vi.stubGlobal(name, undefined);
    const turn = macrotaskTurn();
    let steps = 0;
    void (async () => {
      while (steps < 2000) {
        await Promise.resolve();
        steps += 1;
      }
    })();
    await turn();
    expect(steps, `without ${missing.join(" and ") || "nothing"}`).toBe(2000);
    vi.unstubAllGlobals();
  }
});
