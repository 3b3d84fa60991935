import { silentLog } from "@kv/interface";
import {
  type MemoryNetwork,
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
} from "@kv/transport-memory";
import { type ClusterOptions, planInstances } from "../../src/cluster/cluster-plan.js";
import { type Instance, type InstanceOptions, startInstance } from "../../src/instance/instance.js";
import { readInstanceConfig } from "../../src/instance/instance-config.js";
import { PAIR } from "./matrix.js";

export interface MemoryPair {
  readonly network: MemoryNetwork;
  readonly prefill: Instance;
  readonly decode: Instance;
  close(): Promise<void>;
}

/**
 * Starts one prefill and one decode instance without a proxy, on a memory network in which the test
 * injects faults.
 */
export async function memoryPair(
  decodeConfig: Record<string, unknown> = {},
  options: Partial<ClusterOptions> = {},
): Promise<MemoryPair> {
  const network = memoryNetwork();
  const { prefills, decodes } = planInstances({ ...PAIR, ...options });
  const [p, d] = [prefills[0], decodes[0]];
  if (p === undefined || d === undefined) throw new Error("no instances are planned");
  const prefill = await startInMemory(p.name, p.config, network);
  const kvTransferConfig = { ...d.config.kvTransferConfig, ...decodeConfig };
  const decode = await startInMemory(d.name, { ...d.config, kvTransferConfig }, network);
  return {
    network,
    prefill,
    decode,
    async close() {
      await decode.close();
      await prefill.close();
    },
  };
}

/** Starts an instance as a host of a memory network. */
export function startInMemory(
  host: string,
  config: object,
  network: MemoryNetwork,
  given: Partial<Omit<InstanceOptions, "transport" | "sideChannel">> = {},
): Promise<Instance> {
  return startInstance(readInstanceConfig(config), {
    log: silentLog,
    ...given,
    transport: memoryTransport({ network, host }),
    sideChannel: memorySideChannel({ network, host }),
  });
}

export async function post(
  url: string,
  body: object,
  headers: Readonly<Record<string, string>> = {},
  path = "/v1/completions",
): Promise<{ status: number; body: Answer }> {
  const response = await fetch(`${url}${path}`, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body: JSON.stringify({ temperature: 0, ignore_eos: true, return_token_ids: true, ...body }),
  });
  return { status: response.status, body: (await response.json()) as Answer };
}

export interface Answer {
  readonly choices?: readonly { readonly token_ids: readonly number[] }[];
  readonly usage?: { readonly completion_tokens: number };
  readonly kv_transfer_params?: Record<string, unknown>;
  readonly error?: { readonly code: string; readonly message: string };
}

/** Sends the prefill request of a pair; resolves with the parameters of the decode request. */
export async function prefillLeg(
  pair: MemoryPair,
  prompt: readonly number[],
): Promise<Record<string, unknown>> {
  const { body } = await post(pair.prefill.url, {
    prompt,
    max_tokens: 1,
    kv_transfer_params: { do_remote_decode: true },
  });
  if (body.kv_transfer_params == null)
    throw new Error(`no kv_transfer_params: ${JSON.stringify(body)}`);
  return body.kv_transfer_params;
}
