import { mkdtempSync, readdirSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, beforeAll, expect, test } from "vitest";
import type { Report } from "../src/checks/report.js";
import { record } from "../src/recording/record.js";
import { runKvPeer } from "./run-kv-peer.js";
import { type Served, serveSample } from "./served.js";

const folder = mkdtempSync(join(tmpdir(), "kv-peer-key-"));
const handshakeKeyFile = join(folder, "key");
let served: Served;

beforeAll(async () => {
  writeFileSync(handshakeKeyFile, "the shared key of this test", { mode: 0o600 });
  served = await serveSample({ handshakeKeyFile });
});
afterAll(async () => {
  await served.close();
  rmSync(folder, { recursive: true });
});

async function doctor(...args: string[]) {
  const target = ["--prefill", served.server.url, "--no-bytes", "--json"];
  const { stdout, stderr } = await runKvPeer("doctor", ...target, ...args);
  const { checks } = JSON.parse(stdout) as Report;
  return { stderr, check: checks.find(({ id }) => id === "prefill.side-channel") };
}

test("the doctor reads a side channel with the key, and without it names both mechanisms and the flag", async () => {
  expect((await doctor("--handshake-key-file", handshakeKeyFile)).check?.status).toBe("ok");
  const { check } = await doctor();
  expect(check?.status).toBe("fail");
  expect(check?.found).toMatch(/CURVE.*NULL/);
  expect(check?.fix).toContain("--handshake-key-file");
});

test("a key file that others can read causes a warning on stderr", async () => {
  const exposed = join(folder, "exposed");
  writeFileSync(exposed, "the shared key of this test", { mode: 0o644 });
  const { check, stderr } = await doctor("--handshake-key-file", exposed);
  expect(check?.status).toBe("ok");
  expect(stderr).toMatch(/handshake-key-exposed.*"mode":"644".*chmod 600/);
});

test("a recording is made over the encrypted side channel, and only its owner can read the files", async () => {
  const made = join(folder, "recording");
  const { server: prefill, transport, sideChannel } = served;
  const { prompts } = await record({
    folder: made,
    prefill,
    transport,
    sideChannel,
    prompts: [Array.from({ length: 100 }, (_, at) => at + 10)],
  });
  expect(prompts).toHaveLength(1);
  const modes = readdirSync(made, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map(({ parentPath, name }) => statSync(join(parentPath, name)).mode & 0o777);
  expect(modes.length).toBeGreaterThan(3);
  expect(new Set(modes)).toEqual(new Set([0o600]));
});
