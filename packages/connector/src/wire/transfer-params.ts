import { type BlockIds, KvError, type KvTransferParams } from "@kv/interface";
import { z } from "zod";
import { HOST } from "./host.js";
import { MAX_REQUEST_ID_BYTES } from "./notifications.js";
import { show } from "./show.js";

const MAX_BLOCKS = 4_000_000;
const id = z.string().min(1).max(MAX_REQUEST_ID_BYTES);
const size = z.int().min(1).max(65_536);
const host = z.string().regex(HOST, { error: "not a host name or an IP address" });

const remotePrefill = z.looseObject({
  do_remote_prefill: z.literal(true),
  remote_block_ids: z.array(z.array(z.int().min(0)).max(MAX_BLOCKS)).max(1024),
  remote_engine_id: id,
  remote_request_id: id,
  remote_host: host,
  remote_port: z.int().min(1).max(65_535),
  tp_size: size.nullish(),
  dcp_size: size.nullish(),
  pp_size: size.nullish(),
  remote_num_tokens: z.int().min(0).nullish(),
  remote_blocks_expiry_time: z.number().nullish(),
  remote_registration_generation: z.int().min(0).nullish(),
  transfer_mode: z.string().max(64).nullish(),
});

/** What a decode side is told by the prefill side's answer (vLLM 0.33, pull_scheduler.py `request_finished`). */
export interface RemotePrefillParams {
  readonly kind: "remote-prefill";
  /** Logical block ids per KV cache group. */
  readonly remoteBlockIds: BlockIds;
  readonly remoteEngineId: string;
  readonly remoteRequestId: string;
  readonly remoteHost: string;
  readonly remotePort: number;
  readonly tpSize: number;
  readonly dcpSize: number;
  readonly ppSize: number;
  /** Tokens whose KV the remote blocks hold; undefined from peers that do not say. */
  readonly remoteNumTokens: number | undefined;
  /** On the remote's clock, in seconds; undefined where the peer gives none. */
  readonly remoteBlocksExpiryTime: number | undefined;
  readonly remoteRegistrationGeneration: number;
  readonly transferMode: string;
  /** The parameters as they came, keys included that are not known here. */
  readonly given: KvTransferParams;
}

/** `local`: no transfer is asked for. `remote-decode`: keep the blocks for a decode side. */
export type RequestParams =
  | { readonly kind: "local" }
  | { readonly kind: "remote-decode"; readonly given: KvTransferParams }
  | RemotePrefillParams;

/** Reads `kv_transfer_params` of a request. Errors: `KV_REQUEST_INVALID` naming the key, its value and what is wanted. */
export function parseTransferParams(params: KvTransferParams | null | undefined): RequestParams {
  if (params === undefined || params === null) return { kind: "local" };
  const prefill = flag(params, "do_remote_prefill");
  const decode = flag(params, "do_remote_decode");
  if (prefill && decode) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      "kv_transfer_params: do_remote_prefill and do_remote_decode are both true",
      { hint: "a prefill request has do_remote_decode, a decode request has do_remote_prefill" },
    );
  }
  if (decode) return { kind: "remote-decode", given: params };
  if (!prefill) return { kind: "local" };
  const parsed = remotePrefill.safeParse(params);
  if (!parsed.success) {
    const [issue] = parsed.error.issues;
    const path = issue?.path ?? [];
    const key = path.join(".");
    const value = path.reduce<unknown>(
      (at, name) => (at as Record<PropertyKey, unknown> | undefined)?.[name],
      params,
    );
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: ${key} is ${show(value)}: ${issue?.message ?? "invalid"}`,
      {
        hint: "pass the kv_transfer_params of the prefill answer on unchanged",
        details: { key },
      },
    );
  }
  const data = parsed.data;
  return {
    kind: "remote-prefill",
    remoteBlockIds: data.remote_block_ids,
    remoteEngineId: data.remote_engine_id,
    remoteRequestId: data.remote_request_id,
    remoteHost: data.remote_host,
    remotePort: data.remote_port,
    tpSize: data.tp_size ?? 1,
    dcpSize: data.dcp_size ?? 1,
    ppSize: data.pp_size ?? 1,
    remoteNumTokens: data.remote_num_tokens ?? undefined,
    remoteBlocksExpiryTime: data.remote_blocks_expiry_time ?? undefined,
    remoteRegistrationGeneration: data.remote_registration_generation ?? 0,
    transferMode: data.transfer_mode ?? "pull",
    given: params,
  };
}

export interface RemotePrefillAnswer
  extends Omit<
    RemotePrefillParams,
    "kind" | "given" | "remoteNumTokens" | "remoteBlocksExpiryTime" | "remoteRegistrationGeneration"
  > {
  readonly remoteNumTokens: number;
  /** Pull alone tells these two; without them the keys are left out. */
  readonly remoteBlocksExpiryTime?: number | null;
  readonly remoteRegistrationGeneration?: number;
}

/** What the prefill side answers, under vLLM's keys and in vLLM's order. */
export function encodeRemotePrefillParams(answer: RemotePrefillAnswer): KvTransferParams {
  return {
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_block_ids: answer.remoteBlockIds,
    remote_engine_id: answer.remoteEngineId,
    remote_request_id: answer.remoteRequestId,
    remote_host: answer.remoteHost,
    remote_port: answer.remotePort,
    tp_size: answer.tpSize,
    dcp_size: answer.dcpSize,
    pp_size: answer.ppSize,
    remote_num_tokens: answer.remoteNumTokens,
    ...(answer.remoteBlocksExpiryTime === undefined
      ? {}
      : { remote_blocks_expiry_time: answer.remoteBlocksExpiryTime }),
    ...(answer.remoteRegistrationGeneration === undefined
      ? {}
      : { remote_registration_generation: answer.remoteRegistrationGeneration }),
    transfer_mode: answer.transferMode,
  };
}

/** A request id without the eight hex digits that vLLM appends to it (vLLM: `get_base_request_id`). */
export function baseRequestId(requestId: string): string {
  return requestId.replace(/-[0-9a-f]{8}$/i, "");
}

function flag(params: KvTransferParams, key: string): boolean {
  const value = params[key];
  if (value === undefined || value === null) return false;
  if (typeof value === "boolean") return value;
  throw new KvError("KV_REQUEST_INVALID", `kv_transfer_params: ${key} is ${show(value)}, not true or false`, {
    details: { key },
  });
}
