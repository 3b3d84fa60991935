import { readdirSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, test } from "vitest";
import type { Report } from "../src/checks/report.js";
import { record } from "../src/recording/record.js";
import { runKvPeer } from "./run-kv-peer.js";
import { serveSample } from "./served.js";

const folder = scratchFolder();
const handshakeKeyFile = join(folder, "key");
writeFileSync(handshakeKeyFile, "the shared key of this test", { mode: 0o600 });

async function doctor(keyFile?: string) {
  const { server } = await serveSample({ handshakeKeyFile });
  const key = keyFile === undefined ? "" : ` --handshake-key-file ${keyFile}`;
  const target = `--prefill ${server.url} --no-bytes --json`;
  const { stdout, stderr } = await runKvPeer(`doctor ${target}${key}`);
  const { checks } = JSON.parse(stdout) as Report;
  return { stderr, check: checks.find(({ id }) => id === "prefill.side-channel") };
}

test("the doctor reads a side channel with the key, and without it names both mechanisms and the flag", async () => {
  expect((await doctor(handshakeKeyFile)).check?.status).toBe("ok");
  const { check } = await doctor();
  expect(check?.status).toBe("fail");
  expect(check?.found).toMatch(/CURVE.*NULL/);
  expect(check?.fix).toContain("--handshake-key-file");
});

test("a key file that others can read causes a warning on stderr", async () => {
  const exposed = join(folder, "exposed");
  writeFileSync(exposed, "the shared key of this test", { mode: 0o644 });
  const { check, stderr } = await doctor(exposed);
  expect(check?.status).toBe("ok");
  expect(stderr).toMatch(/handshake-key-exposed.*"mode":"644".*chmod 600/);
});

test("a recording is made over the encrypted side channel, and only its owner can read the files", async () => {
  const served = await serveSample({ handshakeKeyFile });
  const made = join(folder, "recording");
  const prompt = Array.from({ length: 100 }, (_, at) => at + 10);
  const { prompts } = await record({
    ...served,
    folder: made,
    prefill: served.server,
    prompts: [prompt],
  });
  expect(prompts).toHaveLength(1);
  const modes = readdirSync(made, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map(({ parentPath, name }) => statSync(join(parentPath, name)).mode & 0o777);
  expect(modes.length).toBeGreaterThan(3);
  expect(new Set(modes)).toEqual(new Set([0o600]));
});
