import { KvError, type Log, silentLog } from "@kv/interface";
import { expect, test } from "vitest";
import { readTransferConfig } from "./transfer-config.js";
import { transferConfigJsonSchema } from "./transfer-config-schema.js";

const warnings = () => {
  const seen: Record<string, unknown>[] = [];
  const log: Log = { ...silentLog, warn: (event, fields) => seen.push({ event, ...fields }) };
  return { seen, log };
};

test("reads the kv_transfer_config of the Neuron guide unchanged", () => {
  const config = readTransferConfig(
    '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu","kv_connector_extra_config":{"backends":["LIBFABRIC"]}}',
  );
  expect(config).toMatchObject({
    connector: "NixlConnector",
    role: "kv_both",
    bufferDevice: "cpu",
    loadFailurePolicy: "fail",
    backends: [{ name: "LIBFABRIC" }],
    sideChannelHost: "localhost",
    sideChannelPort: 5600,
  });
});

test("vllm#43807: warns of kv_both, and of no other role", () => {
  const { seen, log } = warnings();
  for (const kv_role of ["kv_producer", "kv_consumer", "kv_both"])
    readTransferConfig({ kv_connector: "x", kv_role }, { log });
  expect(seen).toMatchObject([{ event: "role-kv-both-is-deprecated" }]);
});

test("reads the side-channel address from vLLM's environment variables, and passes num_threads to UCX", () => {
  const given = {
    kv_connector: "x",
    kv_role: "kv_producer",
    kv_connector_extra_config: { backends: ["UCX"], num_threads: 4 },
  };
  const env = { VLLM_NIXL_SIDE_CHANNEL_HOST: "10.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT: "5700" };
  const config = readTransferConfig(given, { env });
  expect(config).toMatchObject({ sideChannelHost: "10.0.0.1", sideChannelPort: 5700 });
  expect(config.backends).toEqual([{ name: "UCX", parameters: { num_threads: "4" } }]);
});

const BOTH = { kv_connector: "x", kv_role: "kv_both" };

test.each([
  [{ ...BOTH, kv_lease: 1 }, "KV_CONFIG_UNKNOWN_KEY", "kv_lease"],
  [{ kv_connector: "x", kv_role: "both" }, "KV_CONFIG_INVALID", "kv_role"],
  [{ kv_role: "kv_both" }, "KV_CONFIG_INVALID", "kv_connector"],
  [{ ...BOTH, kv_load_failure_policy: "retry" }, "KV_CONFIG_INVALID", "retry"],
  [{ ...BOTH, kv_connector_extra_config: { backends: "UCX" } }, "KV_CONFIG_INVALID", "backends"],
  [
    {
      ...BOTH,
      kv_connector_extra_config: { backends: ["UCX", "UCX"] },
    },
    "KV_CONFIG_INVALID",
    "different",
  ],
  [{ ...BOTH, kv_connector_extra_config: { backends: [""] } }, "KV_CONFIG_INVALID", "backends"],
  [{ ...BOTH, kv_connector_extra_config: { num_threads: 0 } }, "KV_CONFIG_INVALID", "num_threads"],
  [
    { ...BOTH, kv_connector_extra_config: { num_threads: "4" } },
    "KV_CONFIG_INVALID",
    "num_threads",
  ],
  [{ ...BOTH, kv_connector_extra_config: [] }, "KV_CONFIG_INVALID", "kv_connector_extra_config"],
  ['{"kv_connector": "x", "kv_role": "both"}', "KV_CONFIG_INVALID", 'kv_role is "both"'],
  [
    '{"kv_connector": "x", "kv_role": "kv_both", "__proto__": {}}',
    "KV_CONFIG_UNKNOWN_KEY",
    "__proto__",
  ],
  ["{", "KV_CONFIG_INVALID", "JSON"],
  [null, "KV_CONFIG_INVALID", "the value"],
])("%j is refused with %s", (given, code, text) => {
  const read = () => readTransferConfig(given);
  expect(read).toThrow(expect.objectContaining({ code }));
  expect(read).toThrow(text);
});

test("warns about settings without effect, and suggests the nearest known key for an unknown extra key", () => {
  const { seen, log } = warnings();
  readTransferConfig(
    {
      kv_connector: "x",
      kv_role: "kv_consumer",
      kv_port: 1,
      kv_rank: null,
      kv_parallel_size: 1,
      kv_connector_extra_config: {
        kv_lease_durations: 3,
        zzz: 1,
        theirs: true,
        backends: ["UCX", "POSIX"],
        num_threads: 8,
      },
    },
    { log, extraKeys: ["theirs"] },
  );
  expect(seen).toEqual([
    { event: "setting-not-used", key: "kv_port", value: 1 },
    {
      event: "setting-not-known",
      key: "kv_connector_extra_config.kv_lease_durations",
      value: 3,
      nearest: "kv_lease_duration",
    },
    {
      event: "setting-not-known",
      key: "kv_connector_extra_config.zzz",
      value: 1,
      nearest: undefined,
    },
    {
      event: "setting-not-used",
      key: "kv_connector_extra_config.num_threads",
      value: 8,
      reason: "it applies only to UCX, and the backends are UCX, POSIX",
    },
  ]);
});

test.each(["0.0.0.0", "::", "*"])(
  "warns about unknown VLLM_NIXL_* variables, and about %s as the side-channel host",
  (host) => {
    const { seen, log } = warnings();
    const env = {
      VLLM_NIXL_SIDE_CHANEL_PORT: "1",
      VLLM_NIXL_SIDE_CHANNEL_HOST: host,
      HOME: "/",
      VLLM_NIXL_ABORT_REQUEST_TIMEOUT: "120",
    };
    const config = readTransferConfig({ kv_connector: "x", kv_role: "kv_producer" }, { env, log });
    expect(seen).toMatchObject([
      {
        event: "setting-not-known",
        key: "VLLM_NIXL_SIDE_CHANEL_PORT",
        nearest: "VLLM_NIXL_SIDE_CHANNEL_PORT",
      },
      { event: "side-channel-host-is-no-address", value: host },
    ]);
    expect(config.env).toBe(env);
  },
);

test("an absent or null setting gets vLLM's default", () => {
  const bare = { kv_connector: "x", kv_role: "kv_producer" };
  const nulls = {
    ...bare,
    engine_id: null,
    kv_buffer_device: null,
    kv_connector_module_path: null,
    kv_connector_extra_config: null,
  };
  expect(readTransferConfig(nulls)).toEqual(readTransferConfig(bare));
  expect(readTransferConfig(bare)).toEqual({
    connector: "x",
    role: "kv_producer",
    loadFailurePolicy: "fail",
    enablePermuteLocalKv: false,
    sideChannelHost: "localhost",
    sideChannelPort: 5600,
    backends: [],
    extra: {},
    env: {},
  });
});

test.each(["port", "-1", "65536", "5600.0", "0x10", " "])(
  "port %j in the environment is refused, and the error names the variable",
  (port) => {
    const name = "VLLM_NIXL_SIDE_CHANNEL_PORT";
    const read = () => readTransferConfig(BOTH, { env: { [name]: port } });
    expect(read).toThrow(expect.objectContaining({ code: "KV_CONFIG_INVALID" }));
    expect(read).toThrow(name);
  },
);

test("first-contact.md 3: the error for an unknown key suggests the nearest known key", () => {
  const error = (() => {
    try {
      readTransferConfig({ ...BOTH, kv_buffer_devise: "cpu" });
    } catch (caught) {
      return caught;
    }
  })();
  expect(KvError.is(error) && error.hint).toContain("kv_buffer_device");
});

test("the JSON schema lists the keys, forbids others, and requires kv_connector and kv_role", () => {
  const schema = transferConfigJsonSchema() as {
    properties: object;
    additionalProperties: boolean;
  };
  expect(Object.keys(schema.properties)).toContain("kv_connector_module_path");
  expect(schema.additionalProperties).toBe(false);
  expect(schema).toMatchObject({ required: ["kv_connector", "kv_role"] });
});
