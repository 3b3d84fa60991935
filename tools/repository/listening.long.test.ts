// A long suite: starts every program to see on which addresses it listens.
import { type ChildProcess, execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { readFileSync, rmSync } from "node:fs";
import { networkInterfaces } from "node:os";
import { join } from "node:path";
import { freePorts } from "@kv/testing/free-ports";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { builtProgram } from "@kv/testing/node-programs";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { sampleRecording } from "../../packages/peer/test/sample-recording.js";

/**
 * SECURITY.md says what each program listens on. Each is started and compared with what the kernel
 * reports.
 */
const root = join(import.meta.dirname, "../..");
const children: ChildProcess[] = [];
const INSTANCES = "--prefill 127.0.0.1:1 --decode 127.0.0.1:1 --pairing off --port PORT";
const NAMESPACE = "--block-length 64KiB --fingerprint f --hash-seed s --memory 1MiB";
/**
 * By the first column of the table: the entry and its arguments. A port's placeholder in the table
 * is the flag or the variable before it here.
 */
const PROGRAMS: Readonly<Record<string, string>> = {
  "kv-proxy": `kv-proxy ${INSTANCES}`,
  "kv-proxy --admin-port": `kv-proxy ${INSTANCES} --admin-port PORT`,
  "kv-proxy --sidecar":
    "kv-proxy --sidecar --vllm-port 1 --allow-prefill 10.0.0.0/8 --pairing off --port PORT",
  "kv-epp": `kv-epp ${INSTANCES}`,
  "kv-epp --health-port --metrics-port": `kv-epp ${INSTANCES} --health-port PORT --metrics-port PORT`,
  "kv-peer prefill": "kv-peer prefill --from RECORDING --port PORT --side-channel-port PORT",
  "kv-peer watch --metrics-port": "kv-peer watch --pair http://127.0.0.1:1 --metrics-port PORT",
  "kv-pool serve": `kv-pool serve ${NAMESPACE} --port PORT`,
  "kv-pool serve --admin-port": `kv-pool serve ${NAMESPACE} --port PORT --admin-port PORT`,
  "kv-nixl bench --listen": "kv-nixl bench --listen PORT",
  "demo prefill": "demo prefill --port PORT VLLM_NIXL_SIDE_CHANNEL_PORT PORT",
};

const rows = Array.from(
  readFileSync(join(root, "SECURITY.md"), "utf8").matchAll(
    /^\| `((?:kv-|demo )[^`]*)` \| (`[^|]*) \|/gm,
  ),
  ([, name = "", cell = ""]) => ({ name, listens: [...(cell.match(/[^\s`]+/g) ?? [])] }),
);

let recording = "";
beforeAll(async () => {
  recording = await sampleRecording([100]);
});
afterAll(() => {
  for (const child of children) child.kill("SIGKILL");
  rmSync(recording, { recursive: true, force: true });
});

/** The addresses that a process listens on over TCP and UDP, as `address:port`. */
function listening(pid: number): string[] {
  return execFileSync("ss", ["-Hltunp"], { encoding: "utf8" })
    .split("\n")
    .filter((line) => line.includes(`pid=${pid},`))
    .map((line) => line.trim().split(/\s+/)[4] ?? "");
}

test("the table names the programs that are started here", () => {
  expect(rows.map(({ name }) => name)).toEqual(Object.keys(PROGRAMS));
});

describe.each(rows)("$name", ({ name, listens }) => {
  const needsNixl = listens.includes("interfaces:free");
  test.skipIf(needsNixl && nixlMissing !== undefined)(
    "listens on what SECURITY.md says",
    async () => {
      const [entry = "", ...words] = (PROGRAMS[name] ?? "").split(" ");
      const free = await freePorts(words.length);
      const ports = new Map<string, number>();
      const filled = words.map((word, at) => {
        if (word === "RECORDING") return recording;
        if (word !== "PORT") return word;
        const port = free[at] ?? 0;
        ports.set(words[at - 1] ?? "", port);
        return String(port);
      });
      const variable = filled.indexOf("VLLM_NIXL_SIDE_CHANNEL_PORT");
      const [key = "", value] = variable === -1 ? [] : filled.splice(variable, 2);
      const child = spawn(process.execPath, [builtProgram(entry), ...filled], {
        cwd: root,
        stdio: ["ignore", "pipe", "ignore"],
        env: key === "" ? process.env : { ...process.env, [key]: value },
      });
      children.push(child);
      // The line that says that it is ready.
      await once(child.stdout, "data");

      const found = listening(child.pid ?? 0);
      const expected = listens
        .filter((each) => each !== "interfaces:free")
        .map((each) =>
          each.replace(/:(.*)$/, (_, placeholder: string) => `:${ports.get(placeholder)}`),
        );
      expect(found).toEqual(expect.arrayContaining(expected));
      const others = found.filter((each) => !expected.includes(each));
      const own = Object.values(networkInterfaces()).flatMap((each) =>
        (each ?? []).map(({ address }) => address),
      );
      if (needsNixl) expect(others.length).toBeGreaterThan(0);
      else expect(others).toEqual([]);
      // Never all addresses at once: each is the address of one interface.
      for (const address of others)
        expect(own).toContain(address.replace(/:\d+$/, "").replace(/^\[(.*)\]$/, "$1"));
      const exited = once(child, "exit");
      child.kill("SIGINT");
      await exited;
    },
    60_000,
  );
});
