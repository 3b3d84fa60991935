import { KvError } from "@kv/interface";
import { checkRemotePrefillParams } from "@kv/protocol";

/** What a D has answered about the KV of a finished request, from where a P can read it. */
export interface KvObject {
  /** The `kv_transfer_params` as D wrote them (JSON text). */
  readonly params: string;
  readonly engineId: string;
  /** D's id of the request; no other request of the engine has it. */
  readonly requestId: string;
  readonly generation: number;
  /** Tokens whose KV D holds, from the first of the prompt. */
  readonly tokens: number;
  readonly blocks: readonly number[];
  readonly tpSize: number;
  /**
   * Over so many of D's ranks a block is spread, with decode context parallelism: it has as many
   * times the tokens of a block of its cache.
   */
  readonly dcpSize: number;
  /**
   * D is an engine of this project: it compares what a P of this project reads with its own tokens.
   */
  readonly isKv: boolean;
}

/** The longest object: that of a context of millions of tokens in blocks of 16. */
const MAX_PARAMS_LENGTH = 8 * 1024 * 1024;

/**
 * Reads the `kv_transfer_params` (JSON text) of a D that keeps a finished request's blocks (vLLM
 * 0.33 with `bidirectional_kv_xfer`). Undefined where they name nothing to read.
 *
 * @throws `KV_REQUEST_INVALID` for an object that must not be used: a member is wrong, or it is of
 * a kind for which reading back is not proven (several groups of layers, pipeline parallel engines,
 * a context parallel engine of vLLM, no end of the lease).
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
  // Without it, P would not see that the blocks have been used anew.
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
