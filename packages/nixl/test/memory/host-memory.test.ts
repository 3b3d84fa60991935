import { constants } from "node:buffer";
import { existsSync } from "node:fs";
import { readFile } from "node:fs/promises";
import * as threads from "node:worker_threads";
import type { Memory } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test } from "vitest";
import { loadAddon } from "../../src/addon/load-addon.js";
import { allocateHostMemory } from "../../src/memory/host-memory.js";
import { listsOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";
import { refused } from "../support/refused.js";

const { port1 } = new threads.MessageChannel();

describe.skipIf(nixlMissing)(`memory of the addon (${nixlMissing ?? "found"})`, () => {
  test.each([
    ["", false],
    [", also when the user marked it as untransferable", true],
  ])(
    "its buffer cannot move to another thread, and views of it are empty after close%s",
    (_, marked) => {
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
      if (marked) threads.markAsUntransferable(bytes.buffer);
      memory.close();
      memory.close();
      // Empty; on Node 24, which cannot detach it, zeros.
      expect(bytes[0] ?? 0).toBe(0);
    },
  );

  test("memory that is longer than a view has views of its parts, which are one memory", async () => {
    const memory = allocateHostMemory(loadAddon(), 100_000, {
      populate: true,
      maxViewBytes: 32_768,
    });
    expect(() => memory.bytes).toThrow("100000 bytes does not fit in one view");
    expect(() => memory.view(0, 16_385)).toThrow("too long");
    for (let at = 0; at < 100_000; at += 1000) memory.view(at, 1000).fill(at / 1000);
    const all = new Uint8Array(await memory.gather(Float64Array.of(0, 100_000)));
    expect(all.every((byte, index) => byte === Math.floor(index / 1000))).toBe(true);
    // 16,384 bytes over the border of two buffers.
    expect(memory.view(30_500, 16_384)).toEqual(all.subarray(30_500, 46_884));
    const views = [memory.view(0, 8), memory.view(99_992, 8)];
    memory.close();
    expect(views.map((view) => view[0] ?? 0)).toEqual([0, 0]);
    expect(() => memory.view(0, 1)).toThrow("closed");
  });

  test("6 GiB are one registration, whose last bytes a peer reads", async () => {
    const length = 6 * 2 ** 30;
    await using transport = nixlTransport();
    using memory = transport.allocate(length, { populate: false });
    using target = transport.allocate(4096);
    const [owner, reader] = [await transport.createAgent(), await transport.createAgent()];
    await owner.register(memory);
    await reader.register(target);
    memory.view(length - 4096, 4096).fill(9);
    if (constants.MAX_LENGTH < length)
      expect(() => memory.bytes).toThrow("does not fit in one view");
    else expect(memory.bytes[length - 1]).toBe(9);
    await reader.addRemote(await owner.localMetadata());
    const last = { address: memory.address + length - 4096 };
    const { move } = await listsOf(reader, target, owner.name, last, 4096, 1);
    await move("READ", scattered(1)).done;
    expect(target.bytes.every((byte) => byte === 9)).toBe(true);
    await Promise.all([owner.close(), reader.close()]);
  });

  test.skipIf(!existsSync("/sys/kernel/mm/transparent_hugepage"))(
    "memory of 2 MiB or more begins at such a page and asks for such pages; sparse memory does not",
    async () => {
      const transport = nixlTransport();
      const asks = async (memory: Memory) => {
        // The flags of the mapping that begins at its address: "hg" is MADV_HUGEPAGE.
        const maps = await readFile("/proc/self/smaps", "latin1");
        const [, flags = ""] =
          new RegExp(`^${memory.address.toString(16)}-[^]*?VmFlags:(.*)$`, "m").exec(maps) ?? [];
        return flags.split(" ").includes("hg");
      };
      for (const length of [2 ** 21, 2 ** 21 + 1, 5 * 2 ** 20 + 4096]) {
        const memory = transport.allocate(length);
        expect(memory.address % 2 ** 21).toBe(0);
        await expect.poll(() => asks(memory)).toBe(true);
        memory.bytes[length - 1] = 1;
        memory.close();
      }
      const sparse = transport.allocate(2 ** 22, { populate: false });
      sparse.view(0, 1)[0] = 1;
      expect(await asks(sparse)).toBe(false);
      sparse.close();
    },
  );

  test("a registration waits for the pages to be touched, and the agent works meanwhile", async () => {
    await using transport = nixlTransport();
    const agent = await transport.createAgent();
    const order: string[] = [];
    const first = transport.allocate(2 ** 30);
    const registered = agent.register(first).then((registration) => {
      order.push("registered");
      return registration;
    });
    await agent.localMetadata();
    order.push("metadata");
    await (await registered).close();
    expect(order).toEqual(["metadata", "registered"]);
    first.close();

    const second = transport.allocate(2 ** 30);
    const late = refused(agent.register(second), "KV_AGENT_CLOSED");
    await agent.close();
    await late;
    second.close();
  });
});
