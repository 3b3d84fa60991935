import { KvError } from "@kv/interface";
import { printDoctorReport, refuseValue, showProgress } from "@kv/program";
import type { Command } from "commander";
import { type Report, reportText } from "../checks/report.js";
import { pairDoctor } from "../doctor/pair-doctor.js";
import { readTarget } from "../doctor/target.js";
import { parseJson } from "../http/http-request.js";
import type { SideChannelAddress } from "../protocol/remote-engine.js";
import {
  addPeerCommand,
  type GroupsOptions,
  givenGroups,
  interruptSignal,
  openSideChannel,
  type SideChannelOptions,
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
  addPeerCommand(program, "doctor", { speculativeConfig }).action(async (options: Options) => {
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
