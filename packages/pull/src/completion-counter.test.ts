import { silentLog } from "@kv/interface";
import { describe, expect, it } from "vitest";
import { CompletionCounter } from "./prefill-worker.js";

describe("CompletionCounter", () => {
  it("is complete after n distinct readers", () => {
    const completions = new CompletionCounter({ log: silentLog });
    expect(completions.add("r", "d0", 2)).toBe("waiting");
    expect(completions.add("r", "d1", 2)).toBe("complete");
    expect(completions.size).toBe(0);
    expect(completions.add("one", "d0", 1)).toBe("complete");
  });

  it("does not count the same reader twice", () => {
    const completions = new CompletionCounter({ log: silentLog });
    expect(completions.add("r", "d0", 2)).toBe("waiting");
    expect(completions.add("r", "d0", 2)).toBe("duplicate");
    expect(completions.add("r", "d0", 2)).toBe("duplicate");
    expect(completions.add("r", "d1", 2)).toBe("complete");
  });

  it("uses the largest number of readers, and warns, when readers disagree", () => {
    const warnings: string[] = [];
    const log = { ...silentLog, warn: (event: string) => void warnings.push(event) };
    const completions = new CompletionCounter({ log });
    expect(completions.add("r", "a", 2)).toBe("waiting");
    expect(completions.add("r", "b", 3)).toBe("waiting");
    expect(completions.add("r", "c", 1)).toBe("complete");
    expect(warnings).toEqual(["completion-consumers-disagree", "completion-consumers-disagree"]);
  });

  it("forget returns the number of readers that were counted", () => {
    const completions = new CompletionCounter({ log: silentLog });
    completions.add("r", "d0", 3);
    completions.add("r", "d1", 3);
    expect(completions.forget("r")).toBe(2);
    expect(completions.forget("r")).toBe(0);
    expect(completions.add("r", "d0", 1)).toBe("complete");
  });
});
