import { editMembers } from "./json-members.js";
import { promptFieldsOf } from "./prompt-fields.js";
import type { GenerationRequest } from "./request-body.js";

/** What asks a prefill worker of vLLM's NixlConnector to keep the prompt's blocks for a decode worker (0.33, pull). */
const ASK_FOR_KV =
  '{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,' +
  '"remote_host":null,"remote_port":null}';

/** The body of the prefill leg: one token, not streamed, the KV kept. */
export function prefillBody(request: GenerationRequest, kvTransferParams = ASK_FOR_KV): string {
  const { text, fields, endpoint } = request;
  // With echo, a limit of 0 answers with the prompt alone; vLLM generates a token all the same, and keeps the blocks.
  const limit = promptFieldsOf(request) === "echo" ? "0" : "1";
  const set: Record<string, string> = { stream: "false", kv_transfer_params: kvTransferParams };
  set[endpoint === "/v1/responses" ? "max_output_tokens" : "max_tokens"] = limit;
  if (fields.max_completion_tokens != null) set.max_completion_tokens = limit;
  // Above the limit of tokens vLLM refuses them; below they may stay.
  for (const least of ["min_tokens", "min_completion_tokens"]) {
    if (typeof fields[least] === "number" && fields[least] > Number(limit)) set[least] = limit;
  }
  // Every copy would keep blocks that nobody reads.
  if (fields.n != null) set.n = "1";
  return editMembers(text, { remove: ["stream_options"], set });
}

/** The body of the decode leg: the client's, with the parameters as the prefill worker wrote them (JSON text). */
export function decodeBody(request: GenerationRequest, kvTransferParams: string): string {
  const set: Record<string, string> = { kv_transfer_params: kvTransferParams };
  const remove: string[] = [];
  const fields = promptFieldsOf(request);
  if (fields !== "none") remove.push("prompt_logprobs");
  if (fields === "echo") remove.push("echo");
  else if (request.endpoint === "/v1/chat/completions" && request.fields.echo === true)
    set.top_logprobs = "null";
  return editMembers(request.text, { remove, set });
}

/** The body of a request that one worker computes alone. */
export function aloneBody({ text }: GenerationRequest): string {
  return editMembers(text, { remove: ["kv_transfer_params"] });
}

/**
 * A request that a decode worker of vLLM refuses before its engine sees it (beam search is not streamed): it then tells the prefill
 * worker to free the blocks that the parameters name, and nothing is read (vLLM 0.32 and 0.33, `_with_kv_transfer_rejection_cleanup`). A
 * server that would serve it reads the blocks for one token, which frees them too.
 */
export function releaseBody(model: unknown, kvTransferParams: string): string {
  const refused = { model, prompt: [0], max_tokens: 1, stream: true, use_beam_search: true };
  return editMembers(JSON.stringify(refused), { set: { kv_transfer_params: kvTransferParams } });
}
