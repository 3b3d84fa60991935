import { execFile } from "node:child_process";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { systemClock } from "@kv/interface";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { afterEach, expect, test } from "vitest";
import type { BytesQuestion } from "../src/doctor/bytes-probe.js";
import { probeBytes } from "../src/doctor/bytes-probe.js";
import { pairDoctor } from "../src/doctor/doctor.js";
import { readTarget } from "../src/doctor/target.js";
import { type Check, pairReportSchema } from "../src/report/check.js";
import { reportText } from "../src/report/text.js";
import { engineServer } from "../src/server/server.js";
import { type Served, serveSample } from "./served.js";

// The doctor against two headless servers on real HTTP and ZMQ, which answer with the frames of a real vLLM.
const network = memoryNetwork();
const open: Served[] = [];
afterEach(async () => {
  for (const served of open.splice(0)) await served.close();
});

async function serve(options: Parameters<typeof serveSample>[0] = {}): Promise<Served> {
  const served = await serveSample({ network, ...options });
  open.push(served);
  return served;
}

async function moveBytes(question: BytesQuestion) {
  const transport = memoryTransport({ network });
  const answer = await probeBytes(transport, question, systemClock());
  await transport.close();
  return { kind: "answered" as const, answer, lanes: [] };
}

async function examine(prefill: Served, decode: Served, openServer = (url: string) => engineServer(url)) {
  const { sideChannel } = prefill;
  const report = await pairDoctor({
    prefill: readTarget(prefill.server.url),
    decode: readTarget(decode.server.url),
    sideChannel,
    openServer,
    moveBytes,
    bytes: { write: true },
  });
  expect(pairReportSchema.parse(report)).toEqual(report);
  const check = (id: string): Check | undefined => report.checks.find((each) => each.id === id);
  return { report, check };
}

test("a pair that can work: every line says so, and the blocks that were asked for are free again", async () => {
  const [prefill, decode] = [await serve(), await serve()];
  const { report, check } = await examine(prefill, decode);
  expect(report.checks.filter(({ status }) => status === "fail" || status === "warn")).toEqual([]);
  expect(check("compatibility.prefill")?.found).toContain('model "tiny-qwen3"');
  expect(check("plan.built")?.found).toContain("each byte lands where it belongs");
  expect(check("bytes.prefill")?.found).toMatch(/^8\.0 MiB in /);
  expect(check("bytes.prefill-write")?.status).toBe("ok");
  const used = () => [prefill, decode].map((served) => served.prefill.blocks.used);
  await expect.poll(used, { timeout: 30_000 }).toEqual([0, 0]);
  expect(reportText(report)).toMatch(/\nok: this pair can work\n$/);
});

test("two versions of vLLM: the version and the digest fail, and the factor is named behind digests alone", async () => {
  const prefill = await serve();
  const decode = await serve({
    vllmVersion: "0.32.0",
    factors: { vllm_version: "0.32.0", nixl_connector_version: 14 },
  });
  const { report, check } = await examine(prefill, decode);
  expect(report.verdict).toBe("fail");
  expect(check("versions.vllm")?.found).toContain("0.33.0 at prefill and 0.32.0 at decode");
  expect(check("compatibility.pair")?.found).toContain(
    'nixl_connector_version is 15 at prefill and 14 at decode; vllm_version is "0.33.0" at prefill and "0.32.0" at decode',
  );
  expect(check("compatibility.pair")?.fix).toContain("run one version of vLLM on both sides");
});

test("one server for both sides is found", async () => {
  const served = await serve();
  const { check } = await examine(served, served);
  expect(check("versions.engines")?.status).toBe("fail");
});

test("another model and a wall clock that is off at decode: a warning each, as neither keeps them from pairing", async () => {
  const [prefill, decode] = [await serve(), await serve({ model: "other" })];
  const { report, check } = await examine(prefill, decode, (url) => {
    const server = engineServer(url);
    if (url === prefill.server.url) return server;
    const date = async () => {
      const now = Date.now();
      return { theirsMs: now - 10_000, fromMs: now, toMs: now };
    };
    return { ...server, date };
  });
  expect(report.verdict).toBe("warn");
  expect(check("versions.model")?.found).toBe('"tiny-qwen3" at prefill and "other" at decode');
  expect(check("versions.model")?.fix).toContain("--served-model-name");
  expect(check("clocks.decode-wall")?.found).toBe("at least 9.0 s behind this host");
  expect(check("clocks.decode-wall")?.fix).toContain("run NTP");
  expect(check("clocks.prefill-wall")?.status).toBe("ok");
});

const cli = fileURLToPath(new URL("../src/cli.ts", import.meta.url));
const run = (...args: string[]) =>
  promisify(execFile)(process.execPath, ["--import", "tsx", cli, ...args]).then(
    ({ stdout }) => ({ code: 0, stdout, stderr: "" }),
    (error: { code: number; stdout: string; stderr: string }) => error,
  );

test("the command: exit code 0 and JSON for a server that can be read from", async () => {
  const { server } = await serve();
  const { code, stdout } = await run("doctor", "--prefill", server.url, "--no-bytes", "--json");
  expect(pairReportSchema.parse(JSON.parse(stdout)).verdict).toBe("ok");
  expect(code).toBe(0);
});

test("the command: exit code 1 when a side channel cannot be reached, 2 when it was called wrongly", async () => {
  const { sideChannel } = await serve();
  const listener = await sideChannel.listen({ host: "127.0.0.1", port: 0, answer: () => undefined });
  await listener.close();
  const dead = await run("doctor", "--prefill", `127.0.0.1:${listener.port}`, "--no-bytes");
  expect(dead.stdout).toContain("cannot be reached: the connection was refused");
  expect(dead.code).toBe(1);
  expect((await run("doctor", "--prefill", "nonsense")).code).toBe(2);
});

test.each([
  "doctor --prefill http://127.0.0.1:1 --bogus",
  "doctor --prefill http://127.0.0.1:1 --tp x",
  "doctor",
  "decode",
  "prefill --from . --port x",
  "unheard-of",
])("kv-peer %s: 2, which no limit and no check has", async (line) => {
  const { code, stdout, stderr } = await run(...line.split(" "));
  expect({ code, stdout }).toEqual({ code: 2, stdout: "" });
  expect(stderr).toMatch(/^error: /);
});

test("the help is no wrong call, and shows times as they are given", async () => {
  const { code, stdout } = await run("decode", "--help");
  expect(code).toBe(0);
  expect(stdout).toMatch(/--lease <time> .*\(default: 30s\)/);
});
