import { editMembers } from "./json-members.js";
import type { GenerationRequest } from "./request-body.js";

/** What asks a prefill worker of vLLM's NixlConnector to keep the prompt's blocks for a decode worker (0.33, pull). */
const ASK_FOR_KV =
  '{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,' +
  '"remote_host":null,"remote_port":null}';

/** The body of the prefill leg: one token, not streamed, the KV kept. */
export function prefillBody({ text, fields }: GenerationRequest): string {
  const set: Record<string, string> = { stream: "false", max_tokens: "1", kv_transfer_params: ASK_FOR_KV };
  if (fields.max_completion_tokens != null) set.max_completion_tokens = "1";
  // Above the limit of one token vLLM refuses them; 0 and 1 may stay.
  for (const least of ["min_tokens", "min_completion_tokens"]) {
    if (typeof fields[least] === "number" && fields[least] > 1) set[least] = "1";
  }
  // Every copy would keep blocks that nobody reads.
  if (fields.n != null) set.n = "1";
  return editMembers(text, { remove: ["stream_options"], set });
}

/** The body of the decode leg: the client's, with the parameters as the prefill worker wrote them (JSON text). */
export function decodeBody({ text }: GenerationRequest, kvTransferParams: string): string {
  return editMembers(text, { set: { kv_transfer_params: kvTransferParams } });
}

/** The body of a request that a decode worker computes alone. */
export function aloneBody({ text }: GenerationRequest): string {
  return editMembers(text, { remove: ["kv_transfer_params"] });
}
