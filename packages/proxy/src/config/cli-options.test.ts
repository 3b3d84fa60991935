import { createCommand } from "@kv/fleet/front-end";
import type { KvErrorCode } from "@kv/interface";
import { expect, test } from "vitest";
import { sidecarOfRank } from "../sidecar/data-parallel.js";
import { PROGRAM, parseCli } from "./cli-options.js";
import { readSettings } from "./settings.js";

const FILES: Readonly<Record<string, string>> = {
  "f.json":
    '{"prefillers":["p:1"],"decoders":["d:1"],"port":9,"timeouts":{"stallMs":1,"graceMs":2},"admin":{"port":5}}',
  "bad.json": '{"prefilers":[]}',
  token: "a token from a file\n",
};
const sources = {
  readFile(path: string) {
    const text = FILES[path];
    if (text === undefined) throw new Error("ENOENT");
    return text;
  },
  env: { KV_PROXY_ADMIN_TOKEN: "a token from the environment" },
};

const parse = (line: string) =>
  parseCli(
    line.split(" ").filter((word) => word !== ""),
    sources,
    createCommand(PROGRAM)
      .exitOverride()
      .configureOutput({ writeErr: () => {} }),
  );

const invalid = (message: string, code: KvErrorCode = "KV_CONFIG_INVALID") =>
  expect.objectContaining({ code, message: expect.stringContaining(message) });

test("URLs can be given together or one by one", () => {
  const { settings, host, port } = parse("--prefill a:1 http://b:2 --prefill c:3 --decode d:4");
  expect(settings.prefillers).toEqual(["a:1", "http://b:2", "c:3"]);
  expect(settings.decoders).toEqual(["d:4"]);
  expect({ host, port }).toEqual({ host: "127.0.0.1", port: 8000 });
});

test("mission S3.8: accepts the flags of vLLM's demo proxies, for pull and for push", () => {
  const { settings, port } = parse(
    "--model m -p p:1 p:2 -d d:1 --port 8000 --prefill-engine-id e f --prefill-kv-host 10.0.0.1 " +
      "--prefill-side-channel-port 5600 --prefill-tp-size 2 --prefill-pp-size 4 --push",
  );
  const kv = { host: "10.0.0.1", port: 5600, tpSize: 2, ppSize: 4 };
  expect([port, readSettings(settings)]).toMatchObject([
    8000,
    {
      mode: "push",
      model: "m",
      decoders: ["d:1"],
      prefillers: [
        { url: "http://p:1", kv: { engineId: "e", ...kv } },
        { url: "http://p:2", kv: { engineId: "f", ...kv } },
      ],
    },
  ]);
  expect(parse("-m m --prefill p:1 --decode d:1").settings).toMatchObject({
    model: "m",
    prefillers: ["p:1"],
  });
});

test("accepts the toy proxy's flags, plural and singular", () => {
  const { settings, port } = parse(
    "--port 8192 --prefiller-hosts h1 h2 --prefiller-ports 8100 8101 --decoder-host ::1 --decoder-port 8200",
  );
  expect(port).toBe(8192);
  expect(settings.prefillers).toEqual(["h1:8100", "h2:8101"]);
  expect(settings.decoders).toEqual(["[::1]:8200"]);
});

test("a missing flag of a pair has the toy proxy's default, and a single host serves several ports", () => {
  const { settings } = parse("--prefiller-ports 1 2 --decoder-hosts d");
  expect(settings.prefillers).toEqual(["localhost:1", "localhost:2"]);
  expect(settings.decoders).toEqual(["d:8200"]);
});

test.each([
  ["--prefill p:1 --decode d:1 --workers 0", "--workers is 0, and kv-proxy takes 1 to 64"],
  ["--prefill p:1 --decode d:1 --workers 65", "--workers is 65, and kv-proxy takes 1 to 64"],
  ["--sidecar --allow-prefill p:1 --workers 2", "--workers is 2, and a --sidecar has one process"],
  [
    "--prefiller-hosts a b --prefiller-ports 1 --decode d:1",
    "--prefiller-hosts names 2 and --prefiller-ports 1",
  ],
])("%s is refused by name", (line, message) => {
  expect(() => parse(line)).toThrow(invalid(message));
});

test.each(["--port 70000", "--port x", "--what 1", "--missing-kv maybe", "--host h stray"])(
  "%s is refused",
  (rest) => {
    expect(() => parse(`--prefill p:1 --decode d:1 ${rest}`)).toThrow();
  },
);

test("omits settings that no flag sets", () => {
  const { settings } = parse(
    "--prefill p:1 --decode d:1 --stall-timeout-ms 5 --unsplittable decode-computes",
  );
  expect(settings.timeouts).toEqual({ stallMs: 5 });
  expect(settings.policy).toEqual({ unsplittable: "decode-computes" });
  expect(settings.limits).toBeUndefined();
});

test("flags override the file member by member, and the token comes from the environment or a token file", () => {
  const { settings, port } = parse("--config f.json --decode d:2 --stall-timeout-ms 7");
  expect(port).toBe(9);
  expect(settings).toMatchObject({
    prefillers: ["p:1"],
    decoders: ["d:2"],
    timeouts: { stallMs: 7, graceMs: 2 },
  });
  expect(settings.admin).toEqual({ port: 5, token: "a token from the environment" });
  const routes = parse("--prefill p:1 --decode d:1 --instance-routes --cors-origin *").settings;
  expect([routes.admin, routes.instanceRoutes, routes.cors]).toEqual([
    undefined,
    { token: "a token from the environment" },
    { origins: ["*"] },
  ]);
  expect(parse("--config f.json --admin-token-file token --port 0")).toMatchObject({
    port: 0,
    settings: { admin: { token: "a token from a file" } },
  });
});

test("accepts routing flags, and discovery without lists of instances", () => {
  const { settings } = parse(
    "--dns-prefill p.svc:1 --dns-decode d.svc:2 --routing least-load --decode-routing prefix-aware",
  );
  expect(settings).toMatchObject({
    discovery: { dns: { prefill: "p.svc:1", decode: "d.svc:2" } },
    routing: { prefill: "least-load", decode: "prefix-aware" },
  });
});

test.each([
  ["--config bad.json", "KV_CONFIG_UNKNOWN_KEY", "bad.json"],
  ["--config none.json", "KV_CONFIG_INVALID", "none.json cannot be read as JSON"],
  ["--prefill p:1 --decode d:1 --admin-token-file token", "KV_CONFIG_INVALID", "no admin routes"],
  [
    "--prefill p:1 --decode d:1 --admin-port 1 --admin-token-file gone",
    "KV_CONFIG_INVALID",
    "--admin-token-file gone cannot be read: ENOENT",
  ],
  [
    "--config f.json --prefill-kv-host h",
    "KV_CONFIG_INVALID",
    "has 1 values, but 0 prefill instances",
  ],
] as const)("%s is %s", (line, code, message) => {
  expect(() => parse(line)).toThrow(invalid(message, code));
});

test("a sidecar has llm-d's flags, and the decode instance on this machine", () => {
  const { settings, port } = parse(
    "--sidecar --port 8000 --vllm-port 8200 --allow-prefill 10.0.0.0/8 *.p.svc --enable-tls prefiller",
  );
  expect(port).toBe(8000);
  expect(settings.decoders).toEqual(["127.0.0.1:8200"]);
  expect(settings.sidecar).toEqual({ allow: ["10.0.0.0/8", "*.p.svc"], prefillTls: true });
  expect(parse("--sidecar --allow-prefill *").settings.decoders).toEqual(["127.0.0.1:8200"]);
  const secure = parse(
    "--sidecar --model-server-port 8300 --allow-prefill * --enable-tls decoder --cert-path /certs",
  );
  expect(secure.settings.decoders).toEqual(["https://127.0.0.1:8300"]);
  expect(secure.settings.sidecar).toEqual({
    allow: ["*"],
    tls: { certFile: "/certs/tls.crt", keyFile: "/certs/tls.key" },
  });
  const engines = parse(
    "--sidecar --allow-prefill * --prefill-side-channel-port 5600 --prefill-tp-size 2 --decode-kv-host 10.0.0.7",
  );
  expect(engines.settings.sidecar).toEqual({ allow: ["*"], kv: { port: 5600, tpSize: 2 } });
  expect(engines.settings.decoders).toEqual([
    { url: "http://127.0.0.1:8200", kv: { host: "10.0.0.7" } },
  ]);
  expect(readSettings(engines.settings).prefillers).toEqual([]);
});

test.each([
  ["", undefined],
  ["--secure-proxy", true],
  ["--secure-proxy=true", true],
  ["--secure-proxy=false", false],
])("a sidecar with %j: TLS %j", (flags, tls) => {
  const { settings } = parse(`--sidecar --allow-prefill * ${flags}`.trim());
  expect(settings.sidecar?.tls).toBe(tls);
});

test("F8: a sidecar starts with llm-d's flags for its connectors and pulls of cached KV", () => {
  const { settings } = parse(
    "--sidecar --allow-prefill * --kv-connector nixlv2 --ec-connector ec-nixl --enable-p2p-pull --p2p-connector-port 7000",
  );
  expect(settings.sidecar).toEqual({
    allow: ["*"],
    kvConnector: "nixlv2",
    ecConnector: "ec-nixl",
    p2pPull: true,
    p2pConnectorPort: 7000,
  });
  expect(parse("--sidecar --allow-prefill * --enable-p2p-pull=false").settings.sidecar).toEqual({
    allow: ["*"],
    p2pPull: false,
  });
  expect(() => parse("--sidecar --allow-prefill * --kv-connector offloading")).toThrow("nixlv2");
});

test("each rank of a data-parallel server has a sidecar, its ports by the rank above those of rank 0", () => {
  const { settings, port, dataParallelSize } = parse(
    "--sidecar --port 8000 --vllm-port 8200 --data-parallel-size 2 --allow-prefill * --decode-side-channel-port 5600 --admin-port 9090",
  );
  expect(dataParallelSize).toBe(2);
  expect(sidecarOfRank({ port, settings }, 0, 1)).toEqual({ port, settings });
  expect(sidecarOfRank({ port, settings }, 1, 2)).toMatchObject({
    port: 8001,
    settings: {
      decoders: [{ url: "http://127.0.0.1:8201", kv: { port: 5601 } }],
      sidecar: { allow: ["*"], ranks: { firstPort: 8000, count: 2 } },
      admin: { port: 9091 },
    },
  });
  expect(sidecarOfRank({ port: 0, settings }, 1, 2).port).toBe(0);
  const ofRank = (decoder: string) =>
    sidecarOfRank({ port, settings: { ...settings, decoders: [decoder] } }, 1, 2);
  for (const wrong of [
    () => sidecarOfRank({ port: 65_535, settings }, 1, 2),
    () => ofRank("d:1@1"),
  ])
    expect(wrong).toThrow(invalid(""));
});

test.each([
  ["--vllm-port 1 --prefill p:1 --decode d:1", "--vllm-port is the decode instance of a --sidecar"],
  [
    "--sidecar --vllm-port 1 --decode d:1 --allow-prefill *",
    "--vllm-port is the decode instance of a --sidecar",
  ],
  ["--allow-prefill * --prefill p:1 --decode d:1", "--allow-prefill is given without --sidecar"],
  ["--enable-p2p-pull --prefill p:1 --decode d:1", "--enable-p2p-pull is given without --sidecar"],
  ["--ec-connector e --prefill p:1 --decode d:1", "--ec-connector is given without --sidecar"],
  ["--enable-tls prefiller --prefill p:1 --decode d:1", "--enable-tls is given without --sidecar"],
  [
    "--sidecar --decode d:1 --allow-prefill * --enable-tls decoder",
    "--enable-tls decoder goes with",
  ],
  ["--cert-path c --prefill p:1 --decode d:1", "--cert-path is given without --sidecar"],
  ["--sidecar --allow-prefill * --secure-proxy=false --cert-path c", "--cert-path is given with"],
  ["--data-parallel-size 2 --prefill p:1 --decode d:1", "--data-parallel-size 2 is not valid here"],
  [
    "--sidecar --allow-prefill * --data-parallel-size 0",
    "--data-parallel-size 0 is not valid here",
  ],
  ["--sidecar --allow-prefill * --prefill-tp-size 1 2", "--prefill-tp-size has 2 values"],
  ["--sidecar --allow-prefill * --prefill-engine-id e", "--prefill-engine-id has 1 values"],
])("%s is refused with the reason", (line, message) => {
  expect(() => parse(line)).toThrow(invalid(message));
});

test("discovery in Kubernetes by flags", () => {
  const { settings } = parse("--kubernetes-pods app=vllm,tier=llm --kubernetes-namespace models");
  expect(readSettings(settings).discovery).toMatchObject({
    kubernetes: { podSelector: "app=vllm,tier=llm", namespace: "models" },
  });
});

test.each([
  ['{"prot":1}', "port"],
  ['{"limits":{"maxConections":1}}', "connections"],
  ['{"maxConections":1}', "limits.connections"],
  ['{"routting":{}}', "routing"],
  ['{"routing":{"prefil":"round-robin"}}', "prefill"],
  ['{"prefillers":[{"url":"p:1","labl":"a"}]}', "label"],
  ['{"prefillers":[{"url":"p:1","dcpSize":2}]}', "kv.dcpSize"],
  ['{"prefillers":[{"url":1,"labl":"a"}]}', "label"],
])("first-contact.md 3: %s is refused, and the nearest known key is named", (text, nearest) => {
  const parseFile = () =>
    parseCli(["--config", "f", "-d", "d:1"], { ...sources, readFile: () => text });
  expect(() => readSettings(parseFile().settings)).toThrow(`, did you mean ${nearest}?`);
});
