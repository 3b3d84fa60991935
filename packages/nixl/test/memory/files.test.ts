import { readFile } from "node:fs/promises";
import { join } from "node:path";
import type { Agent, Memory } from "@kv/interface";
import { nixlTransport, openFileMemory } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { listsOf } from "../support/pair.js";
import { pluginMissing } from "../support/plugins.js";
import { refused } from "../support/refused.js";
import { refusesOtherStorage, storesAndLoads } from "./storage-cases.js";

const LENGTH = 10 << 20;
const BLOCK = 65_536;

const missing = await pluginMissing("POSIX");
const folder = scratchFolder();

describe.skipIf(missing)(`files (${missing ?? "POSIX found"})`, () => {
  const transport = nixlTransport({ backends: ["POSIX"] });
  let agent: Agent;
  let memory: Memory;

  beforeAll(async () => {
    agent = await transport.createAgent();
    memory = transport.allocate(LENGTH);
    await agent.register(memory);
  });
  afterAll(async () => {
    await transport.close();
    memory?.close();
  });

  test("the capabilities list FILE", () => {
    expect(transport.capabilities).toMatchObject({
      memoryTypes: ["DRAM", "FILE"],
      notifications: false,
    });
    expect(nixlTransport({ backends: ["UCX"] }).capabilities.memoryTypes).not.toContain("FILE");
  });

  test("WRITE stores blocks in a file, and READ loads them", async () => {
    const path = join(folder, "blocks");
    const file = await openFileMemory(path, { lengthBytes: LENGTH });
    await agent.register(file);
    const lists = await listsOf(agent, memory, agent.name, file, BLOCK, LENGTH / BLOCK);
    await storesAndLoads(agent, memory, lists, async (at) =>
      (await readFile(path)).subarray(at * BLOCK, (at + 1) * BLOCK),
    );
  });

  test("refuses rows outside of the file, files of another agent, and what is no file", async () => {
    const short = await openFileMemory(join(folder, "short"), { lengthBytes: LENGTH - 1 });
    await refusesOtherStorage(agent, short);
    await refused(openFileMemory(folder, { lengthBytes: 1 }), "KV_MEMORY_INVALID");
  });
});

test.skipIf(nixlMissing)("a file is refused without a storage backend", async () => {
  await using transport = nixlTransport({ backends: ["UCX"] });
  const agent = await transport.createAgent();
  using file = await openFileMemory(join(folder, "file"), { lengthBytes: 1 });
  await refused(agent.register(file), "KV_MEMORY_INVALID");
});
