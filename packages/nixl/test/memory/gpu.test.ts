import { spawnSync } from "node:child_process";
import { readdirSync } from "node:fs";
import { deviceMemory, nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { afterAll, describe, expect, test } from "vitest";
import { movesThroughDevices } from "./device-transfer-case.js";
import { movesWithPython } from "./python-transfer-case.js";

const gpus = readdirSync("/dev").filter((name) => /^nvidia\d+$/.test(name));
const missing =
  nixlMissing ?? (gpus.length > 0 ? undefined : "no GPU here: there is no /dev/nvidia0");

const noTorch =
  missing !== undefined || spawnSync("python3", ["-c", "import torch"]).status !== 0
    ? "python3 has no PyTorch"
    : undefined;

/**
 * Real NIXL over UCX with the real driver. The same transfers run with fakes in
 * cuda-driver.test.ts.
 */
describe.skipIf(missing)(
  `memory of a GPU (${missing ?? gpus.join(", ")})`,
  { timeout: 240_000 },
  () => {
    const transport = nixlTransport({ backends: ["UCX"] });
    afterAll(() => transport.close());

    test("the capabilities list VRAM", () => {
      expect(transport.capabilities.memoryTypes).toContain("VRAM");
    });

    test("bytes move from host memory to a GPU, to another agent's GPU memory, and back", async () => {
      await movesThroughDevices(transport, [0, gpus.length > 1 ? 1 : 0]);
    });

    test("refuses memory of another device, and freed memory", async () => {
      const lengthBytes = 1 << 20;
      const agent = await transport.createAgent();
      const memory = transport.allocate(lengthBytes, { memoryType: "VRAM" });
      const { address } = memory;
      const registers = async (deviceId: number) =>
        agent.register(deviceMemory({ address, lengthBytes, deviceId }));
      await expect(registers(1)).rejects.toMatchObject({
        code: "KV_MEMORY_INVALID",
        message: expect.stringContaining("it is memory of device 0"),
      });
      await (await registers(0)).close();
      memory.close();
      await expect(registers(0)).rejects.toMatchObject({ code: "KV_MEMORY_INVALID" });
      await agent.close();
    });

    test("READ from and WRITE to the GPU memory of a Python process", async () => {
      await movesWithPython("cuda");
    });

    test.skipIf(noTorch).each(["torch", "torch-expandable"] as const)(
      `READ from and WRITE to a pool of PyTorch's allocator: %s (${noTorch ?? "PyTorch found"})`,
      movesWithPython,
    );
  },
);

test.skipIf(nixlMissing)(
  `the Python process of the GPU tests, with host memory (${nixlMissing ?? "NIXL found"})`,
  { timeout: 240_000 },
  async () => {
    await movesWithPython("host");
  },
);
