import { nixlTransport } from "@kv/nixl";
import { describe, expect, test } from "vitest";
import { BOTH_BACKENDS } from "../support/both-backends.js";
import { startPeer } from "../support/peer-process.js";
import { runChild } from "../support/run-child.js";

for (const { backend, missing } of BOTH_BACKENDS) {
  describe.skipIf(missing)(`what ${backend} does to its process (${missing ?? "found"})`, () => {
    test("N2, N3: signals, umask, folder, limits and stdout stay; SIGHUP is the host's; children inherit nothing", async () => {
      const { code, stdout, stderr } = await runChild("host-process.ts", [backend]);
      expect(code, stderr).toBe(0);
      // Anything else on stdout would not be JSON.
      const report = JSON.parse(stdout);
      expect(report.after).toEqual(report.before);
      expect(report.inheritedAfter.length).toBe(report.inheritedBefore.length);
      expect(report).toMatchObject({ hangups: 1, trapped: "RuntimeError" });
      expect(report.variables.filter((name: string) => !/^(UCX|FI|NIXL)_/.test(name))).toEqual([]);
    });
  });
}

const [ucx] = BOTH_BACKENDS;
test.skipIf(ucx.missing)(
  "N2: a child that outlives its dead parent keeps no peer believing in it",
  async () => {
    const env = { UCX_TLS: "tcp" };
    const owner = await startPeer(1 << 20, 1, { env });
    const transport = nixlTransport({ env });
    const agent = await transport.createAgent();
    const memory = transport.allocate(1 << 20);
    await agent.register(memory);
    await agent.addRemote(owner.metadata);
    const rows = (base: number) => Float64Array.of(base, 65_536, 0, 65_536, 16);
    const local = await agent.prepareLocal({ memoryType: "DRAM", rows: rows(memory.address) });
    const remote = await agent.prepareRemote(owner.name, { memoryType: "DRAM", rows: rows(owner.address) });
    const ids = Int32Array.from({ length: 16 }, (_, index) => index);
    const read = () =>
      agent.transfer({ operation: "READ", local, localIds: ids, remote, remoteIds: ids, timeoutMs: 10_000 })
        .done;
    await read();
    const child = await owner.ask<number>("spawn");
    await owner.kill();
    try {
      const begun = performance.now();
      await expect(read()).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
      expect(performance.now() - begun).toBeLessThan(5000);
    } finally {
      process.kill(child, "SIGKILL");
      await transport.close();
      memory.close();
    }
  },
);
