import * as threads from "node:worker_threads";
import { nixlTransport } from "@kv/nixl";
import { describe, expect, test } from "vitest";
import { nixlMissing } from "../support/nixl-available.js";

const { port1 } = new threads.MessageChannel();

describe.skipIf(nixlMissing)(`memory of the addon (${nixlMissing ?? "found"})`, () => {
  test("its buffer cannot move to another thread, and views of it are empty after close", () => {
    const memory = nixlTransport().allocate(8192);
    const { bytes } = memory;
    bytes[0] = 1;
    try {
      // Node 20 sends a copy; later versions refuse.
      port1.postMessage(bytes.buffer, [bytes.buffer as ArrayBuffer]);
    } catch (error) {
      expect((error as Error).name).toBe("DataCloneError");
    }
    expect(bytes[0]).toBe(1);
    memory.close();
    // Empty; on Node 24, which cannot detach it, zeros.
    expect(bytes[0] ?? 0).toBe(0);
  });

  test("close works with a buffer that the user marked as untransferable", () => {
    const memory = nixlTransport().allocate(8192);
    threads.markAsUntransferable(memory.bytes.buffer);
    memory.close();
    expect(() => memory.close()).not.toThrow();
  });
});
