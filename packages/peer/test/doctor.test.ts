import { delegateTo } from "@kv/connector/building-blocks";
import { reportOfChecks } from "@kv/program";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { expect, test } from "vitest";
import { type Check, reportSchema, reportText } from "../src/checks/report.js";
import { pairDoctor } from "../src/doctor/pair-doctor.js";

import { readTarget } from "../src/doctor/target.js";
import { runKvPeer } from "./run-kv-peer.js";
import { type Served, serveSample } from "./served.js";

// The doctor against two headless servers with real HTTP and ZMQ, which answer with recorded frames
// of vLLM.
const network = memoryNetwork();
const serve = (options: Parameters<typeof serveSample>[0] = {}) =>
  serveSample({ network, ...options });

async function examine(prefill: Served, decode: Served, limitBytes?: number) {
  const transport = memoryTransport({ network });
  const report = await pairDoctor({
    prefill: readTarget(prefill.server.url),
    decode: readTarget(decode.server.url),
    sideChannel: prefill.sideChannel,
    bytes: { write: true, transport, limitBytes },
  });
  await transport.close();
  expect(reportSchema.parse(report)).toEqual(report);
  const check = (id: string): Check | undefined => report.checks.find((each) => each.id === id);
  return { report, check };
}

test("a working pair passes every check, and the blocks of the doctor's prompts are freed", async () => {
  const [prefill, decode] = [await serve(), await serve()];
  const { report, check } = await examine(prefill, decode);
  // The memory transport takes no time, so that the comparison of READ and WRITE has no meaning.
  const others = report.checks.filter(({ id }) => id !== "bytes.prefill-mode");
  expect(others.filter(({ status }) => status === "fail" || status === "warn")).toEqual([]);
  expect(check("bytes.prefill-mode")?.found).toMatch(
    /^pull is used; WRITE \S+ GB\/s, READ \S+ GB\/s/,
  );
  expect(check("compatibility.prefill")?.found).toContain('model "tiny-qwen3"');
  expect(check("plan.built")?.found).toContain("each byte is read to its final place");
  expect(check("bytes.prefill")?.found).toMatch(/^8\.0 MiB in /);
  expect(check("bytes.prefill-write")?.status).toBe("ok");
  const used = () => [prefill, decode].map((served) => served.prefill.blocks.used);
  await expect.poll(used, { timeout: 30_000 }).toEqual([0, 0]);
  // On a busy machine one of pull and push may be much slower, which is a warning.
  expect(reportText(reportOfChecks(others))).toMatch(/\nok: this pair can work\n$/);
});

test("first-contact.md 1: the blocks of the doctor's prompts are freed when it reads no memory, and when reading fails", async () => {
  const [prefill, decode] = [await serve(), await serve()];
  const used = () => [prefill, decode].map((served) => served.prefill.blocks.used);
  const { report } = await examine(prefill, decode, 0);
  expect(report.checks.filter(({ area }) => area === "bytes")).toEqual([]);
  await expect.poll(used).toEqual([0, 0]);

  const failing = delegateTo(memoryTransport({ network }), {
    allocate: () => expect.fail("no memory is left"),
  });
  const options = {
    prefill: readTarget(prefill.server.url),
    sideChannel: prefill.sideChannel,
    bytes: { transport: failing },
  };
  const { checks } = await pairDoctor(options);
  const interrupted = pairDoctor({ ...options, signal: AbortSignal.abort() });
  await expect(interrupted).rejects.toMatchObject({ code: "KV_REQUEST_ABORTED" });
  await failing.close();
  expect(checks.find(({ id }) => id === "bytes.prefill")?.status).toBe("fail");
  await expect.poll(used).toEqual([0, 0]);
});

test("two versions of vLLM fail the version check and the hash check, which names the factors although only digests were sent", async () => {
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

test("one server as both targets fails", async () => {
  const served = await serve();
  const { check } = await examine(served, served);
  expect(check("versions.engines")?.status).toBe("fail");
});

test("another model at decode is a warning: the pair works", async () => {
  const { report, check } = await examine(await serve(), await serve({ model: "other" }));
  expect(report.verdict).toBe("warn");
  expect(check("versions.model")?.found).toBe('"tiny-qwen3" at prefill and "other" at decode');
  expect(check("versions.model")?.fix).toContain("--served-model-name");
});

test("the command prints JSON and exits with 0 for a server without failures", async () => {
  const { server } = await serve();
  const { code, stdout } = await runKvPeer(`doctor --prefill ${server.url} --no-bytes --json`);
  expect(reportSchema.parse(JSON.parse(stdout)).verdict).toBe("ok");
  expect(code).toBe(0);
});

test("the command exits with 1 when a side channel cannot be reached and with 2 for a wrong call", async () => {
  const { sideChannel } = await serve();
  const place = { host: "127.0.0.1", port: 0 };
  const listener = await sideChannel.listen({ ...place, answer: () => undefined });
  await listener.close();
  const dead = await runKvPeer(`doctor --prefill 127.0.0.1:${listener.port} --no-bytes`);
  expect(dead.stdout).toContain("cannot be reached: the connection was refused");
  expect(dead.code).toBe(1);
  expect((await runKvPeer("doctor --prefill nonsense")).code).toBe(2);
});
