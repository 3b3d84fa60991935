import {
  answerHeaders,
  changedBodyHeaders,
  type Fleet,
  LEFT_OUT_HEADER,
} from "@kv/fleet/front-end";
import type { ProxySettings } from "../config/settings.js";
import { withCachedTokens } from "./answer-filter.js";
import { type Fields, hideMembers } from "./answer-members.js";
import {
  type AnsweredPart,
  mergedId,
  readAllParts,
  sumUsage,
  type Usage,
} from "./answered-parts.js";
import { type AnswerTarget, parsedAnswer, readWhole, validateChoices } from "./leg-answer.js";
import { StreamMerge } from "./merge-streams.js";

/**
 * Merges all parts' answers into one for the client, and ends their visits. Only the instance of a
 * failed part counts a failure.
 * @throws `KV_PROXY_UPSTREAM_FAILED`, the deadline's reason.
 */
export async function mergeAnswers(
  { settings, fleet }: { readonly settings: ProxySettings; readonly fleet: Fleet },
  client: AnswerTarget,
  parts: readonly AnsweredPart[],
): Promise<undefined> {
  try {
    if (parts.every(({ answer }) => answer.eventStream))
      await new StreamMerge(settings, client, parts, fleet.parses).run();
    else await mergeJson(settings, client, parts);
    for (const { answer } of parts) answer.visit.succeeded();
    return undefined;
  } catch (thrown) {
    for (const { answer } of parts) {
      answer.discard();
      answer.visit.abandoned();
    }
    throw client.deadline.reasonOr(thrown);
  }
}

/**
 * Choices in the order of prompts and copies, usage summed, other members from the first answer.
 */
async function mergeJson(
  { limits, timeouts }: Pick<ProxySettings, "limits" | "timeouts">,
  client: AnswerTarget,
  parts: readonly AnsweredPart[],
): Promise<void> {
  const { response, requestId, record } = client;
  const budget: AnswerBudget = {
    leftBytes: limits.mergedAnswerLengthBytes,
    limit: "limits.mergedAnswerLengthBytes",
    leftOut: new Set(),
  };
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
  const merged: Record<string, unknown> = {
    ...first,
    id: mergedId(first?.id, parts[0], requestId),
    choices,
  };
  if (usages.length > 0) merged.usage = sumUsage(usages);
  // The metrics describe one part only.
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

interface AnswerBudget {
  leftBytes: number;
  readonly limit: string;
  readonly leftOut: Set<string>;
}

async function readJsonAnswer(
  part: AnsweredPart,
  budget: AnswerBudget,
  stallMs: number,
): Promise<Fields> {
  const { answer, deadline } = part;
  const { instance } = answer.visit;
  const bytes = await readWhole(answer, deadline, stallMs, budget);
  let fields = parsedAnswer(instance, bytes) as Fields;
  validateChoices(instance, fields, true);
  if (answer.cachedTokens !== undefined && fields.usage != null)
    fields = {
      ...fields,
      usage: withCachedTokens(fields.usage as Usage, await answer.cachedTokens()),
    };
  return hideMembers(fields, answer.kvFromPrefill, budget.leftOut);
}
