// A long suite: processes with few file descriptors.
import { type ChildProcess, fork } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { nixlTransport } from "@kv/nixl";
import { isLongRun } from "@kv/testing/long-run";
import { bundled } from "@kv/testing/node-programs";
import { expect, test } from "vitest";
import { BOTH_BACKENDS } from "../support/both-backends.js";
import { listsOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";
import { runChild } from "../support/run-child.js";

const CHILD = fileURLToPath(new URL("../children/few-descriptors.ts", import.meta.url));

for (const { backend, missing } of BOTH_BACKENDS) {
  test.skipIf(missing)(
    `N5, N6: with 0 to 32 descriptors left ${backend} ends no process, and the error names their lack`,
    { timeout: 300_000 },
    async () => {
      const { code, signal, stdout, stderr } = await runChild("few-descriptors.ts", [
        "matrix",
        backend,
        isLongRun ? "1" : "16",
      ]);
      expect({ code, signal }, stderr.slice(-2000)).toEqual({ code: 0, signal: null });
      const { first, create, two, add, connect } = JSON.parse(stdout);
      expect(first).toBe("done");
      const refused = "KV_TRANSPORT_UNAVAILABLE";
      expect(new Set(create)).toEqual(new Set([refused]));
      expect(new Set(two)).toEqual(new Set([`${refused},${refused}`]));
      for (const outcomes of [add, connect]) {
        // With enough of them the peer is read.
        expect(outcomes.at(-1)).toBe("done");
        for (const outcome of outcomes) expect(outcome).toMatch(/^(done|KV_[A-Z_]+)$/);
      }
    },
  );
}

const [ucx] = BOTH_BACKENDS;
test.skipIf(ucx.missing)(
  "N4: an agent that had no descriptor for a connection accepts the next one, and says so",
  async () => {
    const child: ChildProcess = fork(await bundled(CHILD), ["owner"]);
    const answer = async <T>() => ((await once(child, "message")) as [T])[0];
    const owner = await answer<{ name: string; address: number; metadata: string }>();
    const tell = (message: string) => {
      child.send(message);
      return answer<{ errors: string[] }>();
    };
    const transport = nixlTransport({ env: { UCX_TLS: "tcp" } });
    const read = async () => {
      const agent = await transport.createAgent();
      const memory = transport.allocate(1 << 20);
      await agent.register(memory);
      try {
        await agent.addRemote(Buffer.from(owner.metadata, "base64"));
        const { move } = await listsOf(agent, memory, owner.name, owner, 65_536, 16);
        await move("READ", scattered(16), { timeoutMs: 2000 }).done;
      } finally {
        await agent.close({ timeoutMs: 100 });
        memory.close();
      }
    };
    try {
      await tell("fill");
      await expect(read()).rejects.toMatchObject({ name: "KvError" });
      // On a busy machine the report comes after the answer.
      const errors = async () => (await tell("free")).errors;
      await expect.poll(errors).toContain("nixl-connections-refused");
      await read();
    } finally {
      child.kill("SIGKILL");
      await transport.close();
    }
  },
);
