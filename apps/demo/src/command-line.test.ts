import { describe, expect, it } from "vitest";
import { planInstances, planProxy } from "./cluster/cluster-plan.js";
import { createCommand, type DemoFlags } from "./command-line.js";
import { readInstanceConfig } from "./instance/instance-config.js";
import table from "./options.json" with { type: "json" };
import { type InstanceFlags, instanceSettings } from "./processes/roles.js";

/** What the program's action gets for these arguments. */
async function parsedBy(
  args: readonly string[],
): Promise<{ demo?: DemoFlags; instance?: InstanceFlags }> {
  const found: { demo?: DemoFlags; instance?: InstanceFlags } = {};
  const nothing = async () => {};
  const command = createCommand({
    demo: async (flags) => {
      found.demo = flags;
    },
    accuracy: nothing,
    instance: async (_role, flags) => {
      found.instance = flags;
    },
    proxy: nothing,
  });
  command.exitOverride().configureOutput({ writeErr: () => {} });
  await command.parseAsync(["node", "kv-demo", ...args]);
  return found;
}

async function parsed(...args: string[]): Promise<DemoFlags> {
  const { demo } = await parsedBy(args);
  if (demo === undefined) throw new Error("the demo was not run");
  return demo;
}

/** The names of a command's options, without those of `others`. */
const optionsOf = (command: keyof typeof table, ...others: string[]) =>
  table[command].options.flatMap(({ flags }) => {
    const [name = ""] = flags.split(" ");
    return others.includes(name) ? [] : [name];
  });

const CLUSTER = { transport: "memory", cacheTokens: 1024 } as const;

describe("the flags of the demo", () => {
  const ofInstances = async (...args: string[]) => {
    const { prefills, decodes } = planInstances({ ...(await parsed(...args)), ...CLUSTER });
    return [...prefills, ...decodes].map(({ config }) => config);
  };

  it.each<[string[], object]>([
    [
      ["--connector", "push", "--push-layerwise"],
      {
        kvTransferConfig: {
          kv_connector: "push",
          kv_connector_extra_config: { push_layerwise: true },
        },
      },
    ],
    [
      ["--transport-module", "t", "--platform-module", "p", "--cache-kind-module", "c"],
      { transportModule: "t", platformModule: "p", cacheKindModule: "c" },
    ],
    [
      ["--extra-config", '{"engine_ttl": 5}'],
      { kvTransferConfig: { kv_connector_extra_config: { engine_ttl: 5 } } },
    ],
  ])("%j is for every instance", async (args, settings) => {
    for (const config of await ofInstances(...args)) expect(config).toMatchObject(settings);
  });

  it.each<[string[], object]>([
    [[], { mode: "pull" }],
    // The proxy's order of requests is that of pull.
    [["--connector", "auto"], { mode: "pull" }],
    [
      ["--connector", "push", "--push-legs", "prefill-first"],
      { mode: "push", pushLegs: "prefill-first" },
    ],
    [["--admin-port", "9090"], { admin: { port: 9090 } }],
  ])("%j is for the proxy", async (args, settings) => {
    expect(planProxy([], [], await parsed(...args))).toMatchObject(settings);
  });

  it("give the proxy the side channels of the instances", () => {
    const sideChannel = { host: "127.0.0.1", port: 5600 };
    const running = [{ url: "http://127.0.0.1:1", sideChannel }];
    const spec = { url: "http://127.0.0.1:1", kv: sideChannel };
    expect(planProxy(running, running, { connector: "pull" })).toMatchObject({
      prefillers: [spec],
      decoders: [spec],
    });
  });

  it.each([
    [["--transport-module", "t", "--backend", "UCX"], /takes the place of/],
    [["--platform-module", "p", "--decode-platform", "neuron"], /takes the place of/],
    [["--extra-config", "[]"], /--extra-config is \[\], not a JSON object/],
    [["--connector", "pish"], /not one of .*push.*auto/],
    [["--push-legs", "sideways"], /at-once, prefill-first/],
  ])("%j is refused", async (args, message) => {
    await expect(parsed(...args)).rejects.toThrow(message);
  });

  // Those that take the place of others have tests of their own.
  const OTHERS = ["--transport-module", "--platform-module", "--cache-kind-module", "--turns"];
  const GIVEN: Readonly<Record<string, string>> = {
    "--transport": "nixl",
    "--backend": "libfabric",
    "--connector": "mine",
    "--connector-module": "./mine.js",
    "--push-legs": "prefill-first",
    "--push-layerwise": "",
    "--prefills": "2",
    "--decodes": "3",
    "--prefill-tp": "4",
    "--decode-tp": "2",
    "--prefill-block-size": "32",
    "--decode-block-size": "64",
    "--prefill-platform": "cpu",
    "--decode-platform": "neuron",
    "--staging-blocks": "24",
    "--requests": "5",
    "--max-tokens": "7",
    "--prompts": "prompts.txt",
    "--model": "/models/m",
    "--kv-heads": "8",
    "--extra-config": '{"engine_ttl": 5}',
    "--port": "8300",
    "--admin-port": "9090",
    "--keep": "",
    "--json": "",
    "--trace": "trace.json",
    "--log-level": "error",
  };

  it("reach the run, each of them", async () => {
    expect(Object.keys(GIVEN)).toEqual(optionsOf("demo", ...OTHERS));
    const flags = await parsed(...Object.entries(GIVEN).flat().filter(Boolean));
    expect(flags).toMatchObject({
      requests: 5,
      maxTokens: 7,
      promptsFile: "prompts.txt",
      tinyKvHeads: 8,
      model: "/models/m",
      transport: "nixl",
      port: 8300,
      adminPort: 9090,
      trace: "trace.json",
      logLevel: "error",
      keep: true,
      json: true,
    });
    const { prefills, decodes } = planInstances({
      ...flags,
      transport: "nixl",
      cacheTokens: 6400,
      leaseSeconds: 9,
      requestTimeoutSeconds: 8,
      instance: { intraOpThreads: 3 },
      prefillInstance: { maxNumSeqs: 1 },
    });
    const shared = {
      transportModule: undefined,
      platformModule: undefined,
      cacheKindModule: undefined,
      digests: true,
      debug: true,
      graceMs: 2000,
      sideChannelHost: "127.0.0.1",
      intraOpThreads: 3,
      model: "/models/m",
      tinyKvHeads: 8,
      kvTransferConfig: {
        kv_connector: "mine",
        // That of vllm-neuron's issue 26, as one side is Neuron.
        kv_role: "kv_both",
        kv_buffer_device: "cpu",
        kv_connector_module_path: "./mine.js",
        kv_connector_extra_config: {
          backends: ["LIBFABRIC"],
          kv_lease_duration: 9,
          request_timeout: 8,
          push_layerwise: true,
          engine_ttl: 5,
        },
      },
    };
    const prefill = {
      ...shared,
      role: "prefill",
      platform: "cpu",
      tp: 4,
      blockSize: 32,
      numBlocks: 201,
    };
    const decode = {
      ...shared,
      role: "decode",
      platform: "neuron",
      tp: 2,
      blockSize: 64,
      numBlocks: 101,
    };
    const named = (role: string, count: number, config: object) =>
      Array.from({ length: count }, (_, i) => ({
        name: `${role}-${i}`,
        config: { ...config, name: `${role}-${i}` },
      }));
    expect(prefills).toEqual(
      named("prefill", 2, { ...prefill, stagingBlocks: undefined, maxNumSeqs: 1 }),
    );
    expect(decodes).toEqual(named("decode", 3, { ...decode, stagingBlocks: 24 }));
  });

  it("are those of vLLM's guide by default: a producer and a consumer", async () => {
    const configs = await ofInstances();
    expect(configs.map(({ kvTransferConfig }) => kvTransferConfig)).toEqual([
      { kv_connector: "NixlConnector", kv_role: "kv_producer", kv_connector_extra_config: {} },
      { kv_connector: "NixlConnector", kv_role: "kv_consumer", kv_connector_extra_config: {} },
    ]);
    expect(configs[0]).toMatchObject({ sideChannelHost: "prefill-0", numBlocks: 65 });
  });

  it.each([
    [[], 16, undefined],
    [["--prefill-platform", "neuron"], 30, undefined],
    [["--backend", "memory"], 16, "memory"],
    [["--backend", "ucx"], 16, "nixl"],
  ])(
    "with %j, the output has %i tokens and the transport is %s",
    async (args, maxTokens, transport) => {
      expect(await parsed(...args)).toMatchObject({ maxTokens, transport });
    },
  );
});

describe("the settings of a server that is started by hand", () => {
  const flags = { logLevel: "info" } as const;

  const GIVEN: Readonly<Record<string, readonly [text: string, setting: string, value: unknown]>> =
    {
      "--host": ["::1", "host", "::1"],
      "--port": ["8101", "port", 8101],
      "--model": ["/models/m", "model", "/models/m"],
      "--tp": ["2", "tp", 2],
      "--dp": ["3", "dp", 3],
      "--block-size": ["32", "blockSize", 32],
      "--num-blocks": ["40", "numBlocks", 40],
      "--max-model-len": ["300", "maxModelLen", 300],
      "--max-num-seqs": ["5", "maxNumSeqs", 5],
      "--max-num-batched-tokens": ["48", "maxNumBatchedTokens", 48],
      "--platform": ["neuron", "platform", "neuron"],
      "--platform-module": ["p", "platformModule", "p"],
      "--transport-module": ["t", "transportModule", "t"],
      "--cache-kind-module": ["c", "cacheKindModule", "c"],
    };

  it.each(["prefill", "decode", "instance"] as const)(
    "are the options of %s, each of them",
    async (command) => {
      const others = [
        "--config",
        "--kv-transfer-config",
        "--extra-config",
        "--trace",
        "--log-level",
      ];
      expect(Object.keys(GIVEN)).toEqual(optionsOf(command, ...others));
      const args = Object.entries(GIVEN).flatMap(([option, [text]]) => [option, text]);
      const config = ["--config", '{"role": "both", "port": 1}'];
      const { instance } = await parsedBy([command, ...args, ...config, "--log-level", "error"]);
      if (instance === undefined) throw new Error("no instance was started");
      expect(instance.logLevel).toBe("error");
      const settings = readInstanceConfig(instanceSettings(undefined, instance));
      expect(settings).toMatchObject(
        Object.fromEntries(Object.values(GIVEN).map(([, setting, value]) => [setting, value])),
      );
    },
  );

  it("are those of its role by default", () => {
    expect(instanceSettings("prefill", flags)).toEqual({
      role: "prefill",
      kvTransferConfig: { kv_connector: "NixlConnector", kv_role: "kv_producer" },
    });
    expect(instanceSettings("decode", { ...flags, port: 8201 })).toMatchObject({
      role: "decode",
      port: 8201,
      kvTransferConfig: { kv_role: "kv_consumer" },
    });
  });

  it("are those of --config, and options come before them", () => {
    const config =
      '{"role":"both","port":1,"tp":2,"kvTransferConfig":{"kv_connector":"push","kv_role":"kv_both"}}';
    expect(instanceSettings(undefined, { ...flags, config, port: 2 })).toMatchObject({
      role: "both",
      port: 2,
      tp: 2,
      kvTransferConfig: { kv_connector: "push" },
    });
    const extraConfig = '{"engine_ttl": 5}';
    const kvTransferConfig =
      '{"kv_connector":"x","kv_role":"kv_both","kv_connector_extra_config":{"backends":["UCX"]}}';
    expect(
      instanceSettings(undefined, { ...flags, config, kvTransferConfig, extraConfig }),
    ).toMatchObject({
      kvTransferConfig: {
        kv_connector: "x",
        kv_connector_extra_config: { backends: ["UCX"], engine_ttl: 5 },
      },
    });
  });
});
