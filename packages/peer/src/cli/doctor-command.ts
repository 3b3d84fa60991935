import { KvError } from "@kv/interface";
import {
  count,
  hostAndPort,
  listOf,
  oneOf,
  printDoctorReport,
  refuseValue,
  showProgress,
} from "@kv/program";
import type { Command } from "commander";
import { type Report, reportText } from "../checks/report.js";
import { pairDoctor } from "../doctor/pair-doctor.js";
import { readTarget } from "../doctor/target.js";
import { parseJson } from "../http/http-request.js";
import type { SideChannelAddress } from "../protocol/remote-engine.js";
import {
  addGroupsOptions,
  type GroupsOptions,
  givenGroups,
  handshakeKeyOption,
  interruptSignal,
  openSideChannel,
  type SideChannelOptions,
  timeOption,
} from "./options.js";

interface Options extends SideChannelOptions, GroupsOptions {
  prefill: string;
  decode?: string;
  tp?: number;
  prefillTp?: number;
  decodeTp?: number;
  prefillSideChannel?: SideChannelAddress;
  decodeSideChannel?: SideChannelAddress;
  ask: boolean;
  bytes: boolean;
  limitMib: number;
  write?: true;
  backend?: string[];
  model?: string;
  dtype?: string;
  kvHeads?: number;
  headSize?: number;
  layers?: number;
  attentionBackend?: string;
  kvCacheDtype?: string;
  disableHybridKvCacheManager?: true;
  revision?: readonly string[];
  codeRevision?: readonly string[];
  speculativeConfig?: Readonly<Record<string, unknown>>;
  transferMode?: "pull" | "push";
  vllmVersion?: string;
  connectorVersion?: number;
  lease: number;
  timeout: number;
  json?: true;
}

export function addDoctor(program: Command): void {
  const command = program
    .command("doctor")
    .description("report why two servers can or cannot transfer KV; exit code 1 when a check fails")
    .optionsGroup("Servers:")
    .requiredOption(
      "--prefill <target>",
      "the prefill server: http://host:port, or host:port of its side channel alone",
    )
    .option("--decode <target>", "the decode server, likewise; without it only prefill is checked")
    .option("--tp <n>", "tensor-parallel size of both, where they do not announce it", count)
    .option(
      "--prefill-tp <n>",
      "tensor-parallel size of prefill, in place of the announced one",
      count,
    )
    .option(
      "--decode-tp <n>",
      "tensor-parallel size of decode, in place of the announced one",
      count,
    )
    .option(
      "--prefill-side-channel <host:port>",
      "side channel of prefill, if not announced",
      hostAndPort,
    )
    .option(
      "--decode-side-channel <host:port>",
      "side channel of decode, if not announced",
      hostAndPort,
    )
    .addOption(handshakeKeyOption())
    .optionsGroup("Checks:")
    .option(
      "--no-ask",
      "send no prompt of two tokens; the servers do not announce their side channels then",
    )
    .option("--no-bytes", "read no memory of the servers")
    .option("--limit-mib <n>", "memory to read at most from each server", count, 64)
    .option("--write", "write prefill's null blocks back as they were read")
    .option("--backend <names>", "NIXL backends, separated by commas", listOf(String))
    .addOption(timeOption("--lease <time>", "kv_lease_duration of prefill", "30s"))
    .option("--timeout <ms>", "limit of one handshake", count, 5000)
    .optionsGroup("Model, where a check needs it:")
    .option("--model <name>", "the servers' --model, a factor of the compatibility hash")
    .option(
      "--revision <commits>",
      "commits of the model's repository that the servers may have loaded, where vLLM hashes them",
      listOf(String),
    )
    .option("--code-revision <names>", "their --code-revision, likewise", listOf(String))
    .option("--dtype <name>", 'dtype of the model, such as "bfloat16"')
    .option("--kv-heads <n>", "KV heads of the model", count)
    .option("--head-size <n>", "head size of the model", count)
    .option("--layers <n>", "layers of the model", count)
    .option("--attention-backend <name>", "attention backend of the servers")
    .option("--kv-cache-dtype <name>", "type of the cache, as vLLM names it")
    .option("--disable-hybrid-kv-cache-manager", "the servers run with this flag")
    .option(
      "--speculative-config <json>",
      "vLLM's setting of the server that has one: its method, model and revision",
      speculativeConfig,
    )
    .option("--transfer-mode <mode>", "pull or push", oneOf("pull", "push"))
    .option("--vllm-version <version>", "version of the servers, where they do not announce it")
    .option("--connector-version <n>", "NIXL_CONNECTOR_VERSION of the servers", count);
  addGroupsOptions(command)
    .optionsGroup("Options:")
    .option("--json", "print a JSON report")
    .action(async (options: Options) => {
      printDoctorReport(await runDoctor(options), { json: options.json, text: reportText });
    });
}

async function runDoctor(options: Options): Promise<Report> {
  const groups = await givenGroups(options);
  await using sideChannel = openSideChannel(options);
  using _ = showProgress("kv-peer", () => "checking");
  return await pairDoctor({
    signal: interruptSignal(),
    prefill: readTarget(options.prefill),
    decode: options.decode === undefined ? undefined : readTarget(options.decode),
    sideChannel,
    prefillTp: options.prefillTp ?? options.tp,
    decodeTp: options.decodeTp ?? options.tp,
    sideChannels: { prefill: options.prefillSideChannel, decode: options.decodeSideChannel },
    ask: options.ask,
    groups,
    factors: factorsOf(options),
    leaseMs: options.lease,
    timeoutMs: options.timeout,
    bytes: {
      // Without bytes, only the blocks of its own prompts are freed.
      limitBytes: options.bytes ? options.limitMib * 2 ** 20 : 0,
      write: options.write === true,
      backends: options.backend,
    },
  });
}

function speculativeConfig(text: string): Readonly<Record<string, unknown>> {
  const value = parseJson(text);
  if (typeof value === "object" && value !== null && !Array.isArray(value) && "method" in value)
    return value as Readonly<Record<string, unknown>>;
  return refuseValue(
    'It must be a JSON object with a method, such as {"method":"eagle3","model":"org/name"}.',
  );
}

function factorsOf(options: Options): Record<string, unknown> {
  const { dtype } = options;
  if (dtype !== undefined && !/^(torch\.)?(bfloat16|float16|float32)$/.test(dtype)) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--dtype is "${dtype}"; it must be bfloat16, float16 or float32`,
    );
  }
  const factors = {
    model: options.model,
    revision: options.revision,
    code_revision: options.codeRevision,
    dtype: dtype === undefined || dtype.startsWith("torch.") ? dtype : `torch.${dtype}`,
    num_kv_heads: options.kvHeads,
    head_size: options.headSize,
    num_hidden_layers: options.layers,
    attn_backend_name: options.attentionBackend,
    cache_dtype: options.kvCacheDtype,
    is_hma_enabled: options.disableHybridKvCacheManager === true ? false : undefined,
    speculative_config: options.speculativeConfig,
    transfer_mode: options.transferMode,
    vllm_version: options.vllmVersion,
    nixl_connector_version: options.connectorVersion,
  };
  return Object.fromEntries(Object.entries(factors).filter(([, value]) => value !== undefined));
}
