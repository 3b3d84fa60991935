import { KvError } from "@kv/interface";
import { checkRemotePrefillParams } from "@kv/protocol";

/** KV of a finished request that a P can read from a D. */
export interface KvObject {
  /** D's `kv_transfer_params` (JSON text). */
  readonly params: string;
  readonly engineId: string;
  /** Unique in the engine. */
  readonly requestId: string;
  readonly generation: number;
  /** Length of the prefix whose KV D holds. */
  readonly tokens: number;
  readonly blocks: readonly number[];
  readonly tpSize: number;
  /**
   * D's decode context parallel ranks: a block has this many times the tokens of a block in one
   * cache.
   */
  readonly dcpSize: number;
  /** D is an engine of this project, which checks the tokens that this project's P reads. */
  readonly isKv: boolean;
}

/** Enough for millions of tokens in blocks of 16. */
const MAX_PARAMS_LENGTH = 8 * 1024 * 1024;

/**
 * Reads the `kv_transfer_params` (JSON text) of a D that keeps a finished request's blocks (vLLM
 * 0.33 with `bidirectional_kv_xfer`). Undefined when there is nothing to read.
 *
 * @throws `KV_REQUEST_INVALID` for a wrong member, and where reading back is not proven (several
 * groups of layers, pipeline parallel engines, a context parallel engine of vLLM, no end of the
 * lease).
 */
export function readKvObject(params: string): KvObject | undefined {
  if (params.length > MAX_PARAMS_LENGTH) throw unusable(`it has ${params.length} characters`);
  const fields = JSON.parse(params) as Readonly<Record<string, unknown>> | null;
  if (typeof fields !== "object" || fields === null || fields.do_remote_decode !== true)
    return undefined;
  const problem = checkRemotePrefillParams({
    ...fields,
    do_remote_decode: false,
    do_remote_prefill: true,
  });
  if (problem !== undefined) throw problem;
  const {
    remote_num_tokens: tokens,
    remote_blocks_expiry_time: expiry,
    tp_size: tpSize = 1,
  } = fields;
  if (typeof tokens !== "number" || !Number.isSafeInteger(tokens) || tokens < 1)
    throw unusable(`remote_num_tokens is ${JSON.stringify(tokens)}`);
  // P would not notice that the blocks are in use again.
  if (typeof expiry !== "number") throw unusable("it has no remote_blocks_expiry_time");
  const isKv = fields.kv_peer != null;
  const { pp_size: ppSize = 1, dcp_size: dcpSize = 1 } = fields;
  if (ppSize !== 1) throw unusable(`pp_size is ${JSON.stringify(ppSize)}`);
  if (dcpSize !== 1 && !isKv)
    throw unusable(`dcp_size is ${JSON.stringify(dcpSize)}, of an engine of vLLM`);
  if (fields.transfer_mode !== undefined && fields.transfer_mode !== "pull")
    throw unusable(`transfer_mode is ${JSON.stringify(fields.transfer_mode)}`);
  const groups = fields.remote_block_ids as readonly (readonly number[])[];
  const [blocks = []] = groups;
  if (groups.length !== 1) throw unusable(`it has ${groups.length} groups of layers`);
  if (new Set(blocks).size !== blocks.length) throw unusable("it names a block twice");
  return {
    params,
    engineId: fields.remote_engine_id as string,
    requestId: fields.remote_request_id as string,
    generation: (fields.remote_registration_generation as number | undefined) ?? 0,
    tokens,
    blocks,
    tpSize: tpSize as number,
    dcpSize: dcpSize as number,
    isKv,
  };
}

function unusable(why: string): KvError {
  return new KvError(
    "KV_REQUEST_INVALID",
    `a decode instance's kv_transfer_params cannot be read back: ${why}`,
  );
}
