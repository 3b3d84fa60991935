import { shownValue } from "@kv/http";

type Fields = Readonly<Record<string, unknown>>;

/**
 * Why prefill and decode of a request to `endpoint` cannot run on two instances without a wrong answer (vLLM 0.32 and 0.33); undefined where they
 * can.
 */
export function disaggregationLimit(endpoint: string, fields: Fields): string | undefined {
  if (fields.use_beam_search === true) {
    return "use_beam_search runs several sequences, and only one reader can read the prefill worker's blocks";
  }
  if (typeof fields.best_of === "number" && fields.best_of > 1) {
    return `best_of is ${fields.best_of}, which chooses among copies in one server; vLLM no longer supports it`;
  }
  if (fields.prompt != null && fields.prompt_embeds != null && endpoint === "/v1/completions") {
    return "prompt and prompt_embeds are both given, so answers cannot be matched to prompts";
  }
  if (endpoint === "/v1/chat/completions" && fields.echo === true && fields.logprobs === true) {
    return "echo with logprobs in a chat needs the prompt computed by the server that generates";
  }
  return endpoint === "/v1/responses" ? responsesLimit(fields) : undefined;
}

/** Parts of the Responses API that live in one server's memory, or that run several turns there: each turn would read the blocks again. */
function responsesLimit(fields: Fields): string | undefined {
  for (const param of ["previous_response_id", "previous_input_messages", "prompt"]) {
    if (fields[param] != null) return `${param} refers to data that only the server that created it has`;
  }
  if (fields.background === true) return "background responses are kept by the server that runs them";
  const tools = Array.isArray(fields.tools) ? (fields.tools as { type?: unknown }[]) : [];
  const builtIn = tools.find((tool) => tool?.type !== "function");
  if (builtIn !== undefined) {
    return `the tool ${shownValue(builtIn?.type)} runs in the server, which then generates more than once`;
  }
  return undefined;
}
