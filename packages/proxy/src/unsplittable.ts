import type { Endpoint } from "./endpoint.js";

type Fields = Readonly<Record<string, unknown>>;

/** Why a request cannot be parted into prefill and decode without a wrong answer; undefined where it can. vLLM 0.32 and 0.33. */
export function whyUnsplittable(endpoint: Endpoint, fields: Fields): string | undefined {
  if (fields.use_beam_search === true) {
    return "use_beam_search runs several sequences, and the prefill worker's blocks are there for one reader only";
  }
  if (typeof fields.best_of === "number" && fields.best_of > 1) {
    return `best_of is ${fields.best_of}, which chooses among copies in one server; vLLM does not know it any more`;
  }
  if (fields.prompt != null && fields.prompt_embeds != null && endpoint === "/v1/completions") {
    return "prompt and prompt_embeds are both given, and which answer belongs to which cannot be known";
  }
  if (endpoint === "/v1/chat/completions" && fields.echo === true && fields.logprobs === true) {
    return "echo with logprobs in a chat needs the prompt computed where the answer is made";
  }
  return endpoint === "/v1/responses" ? whyOneServer(fields) : undefined;
}

/** What the Responses API keeps in one server's memory, or runs in several turns there: each turn would read the blocks again. */
function whyOneServer(fields: Fields): string | undefined {
  for (const param of ["previous_response_id", "previous_input_messages", "prompt"]) {
    if (fields[param] != null) return `${param} names what only the server that made it has`;
  }
  if (fields.background === true) return "background responses are kept by the server that runs them";
  const tools = Array.isArray(fields.tools) ? (fields.tools as { type?: unknown }[]) : [];
  const builtIn = tools.find((tool) => tool?.type !== "function");
  if (builtIn !== undefined) {
    return `the tool ${JSON.stringify(builtIn?.type)} runs in the server, which then generates more than once`;
  }
  return undefined;
}
