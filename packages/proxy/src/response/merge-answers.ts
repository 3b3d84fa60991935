import {
  answerHeaders,
  changedBodyHeaders,
  type Fleet,
  LEFT_OUT_HEADER,
} from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { badAnswer } from "../upstream/upstream-errors.js";
import { hideMembers } from "./answer-members.js";
import { type AnsweredPart, mergedId, PartFailure, readAllParts } from "./answered-parts.js";
import { withCachedTokens } from "./cached-tokens.js";
import { type AnswerTarget, readChunk, validateChoices } from "./leg-answer.js";
import { mergePromptLogprobs } from "./merge-prompt-logprobs.js";
import { mergeStreams } from "./merge-streams.js";
import { sumUsage, type Usage } from "./sum-usage.js";

type Fields = Record<string, unknown>;

/**
 * Merges the answers of a request's parts into one, writes it to the client, and ends the parts'
 * visits. Where the answer of one part fails, only its instance counts a failure.
 * @throws `KV_PROXY_UPSTREAM_FAILED`, the deadline's reason.
 */
export async function mergeAnswers(
  { settings, fleet }: { readonly settings: ProxySettings; readonly fleet: Fleet },
  client: AnswerTarget,
  parts: readonly AnsweredPart[],
): Promise<void> {
  try {
    if (parts.every(({ answer }) => answer.eventStream))
      await mergeStreams(settings, client, parts, fleet.parses);
    else await mergeJson(settings, client, parts);
    for (const { answer } of parts) answer.visit.succeeded();
  } catch (thrown) {
    const [failedPart, cause] =
      thrown instanceof PartFailure ? [thrown.part, thrown.error] : [undefined, thrown];
    const error = KvError.from(
      client.deadline.reasonOr(cause),
      "KV_INTERNAL",
      "the answers could not be merged",
    );
    for (const part of parts) {
      const { answer } = part;
      answer.discard();
      if (part === failedPart && !client.deadline.aborted) answer.visit.failed(error);
      else answer.visit.abandoned();
    }
    throw error;
  }
}

/**
 * One JSON answer: the choices in the order of prompts and copies, the usage summed, and all other
 * members from the first answer.
 */
async function mergeJson(
  { limits, timeouts }: Pick<ProxySettings, "limits" | "timeouts">,
  client: AnswerTarget,
  parts: readonly AnsweredPart[],
): Promise<void> {
  const { response, requestId, record } = client;
  const budget = { leftBytes: limits.mergedAnswerLengthBytes, leftOut: new Set<string>() };
  const bodies = await readAllParts(parts, (part) =>
    readJsonAnswer(part, budget, timeouts.stallMs),
  );
  const [first] = bodies;
  const choices = bodies
    .flatMap((body) => body.choices as Fields[])
    .map((choice, index) => ({ ...choice, index }));
  const usages = bodies.flatMap(({ usage }, at) =>
    usage == null ? [] : [{ usage: usage as Usage, copy: parts[at]?.copy ?? 0 }],
  );
  const merged: Fields = { ...first, id: mergedId(first?.id, parts[0], requestId), choices };
  if (usages.length > 0) merged.usage = sumUsage(usages);
  // They describe one part only.
  if (parts.length > 1 && "metrics" in merged) merged.metrics = null;
  const text = Buffer.from(JSON.stringify(merged));
  const headers = answerHeaders(changedBodyHeaders(parts[0]?.answer.headers ?? {}), requestId);
  headers["content-length"] = text.length;
  if (budget.leftOut.size > 0) headers[LEFT_OUT_HEADER] = [...budget.leftOut].join(", ");
  response.writeHead(200, headers);
  record.status = 200;
  record.answerLengthBytes = text.length;
  response.end(text);
}

async function readJsonAnswer(
  part: AnsweredPart,
  budget: { leftBytes: number; readonly leftOut: Set<string> },
  stallMs: number,
): Promise<Fields> {
  const { answer, deadline } = part;
  const { url } = answer.visit.instance;
  const chunks: Uint8Array[] = [answer.held];
  budget.leftBytes -= answer.held.length;
  for (;;) {
    if (budget.leftBytes < 0)
      throw badAnswer("decode", url, "answered with more than limits.mergedAnswerLengthBytes");
    const chunk = await readChunk(answer, deadline, stallMs);
    if (chunk === undefined) break;
    chunks.push(chunk);
    budget.leftBytes -= chunk.byteLength;
  }
  let fields: Fields;
  try {
    fields = JSON.parse(Buffer.concat(chunks).toString("utf8")) as Fields;
  } catch (cause) {
    throw badAnswer("decode", url, "answered 200 with a body that is not JSON", cause);
  }
  validateChoices("decode", url, fields, true);
  if (answer.cachedTokens !== undefined && fields.usage != null)
    fields = {
      ...fields,
      usage: withCachedTokens(fields.usage as Usage, await answer.cachedTokens()),
    };
  fields = hideMembers(fields, answer.kvFromPrefill, budget.leftOut);
  return mergePromptLogprobs(part.request, fields, answer.promptAnswer);
}
