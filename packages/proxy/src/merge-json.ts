import { badAnswer } from "./bad-answer.js";
import { choicesOf } from "./choices.js";
import type { Exchange } from "./exchange.js";
import type { GatheredPart } from "./gather.js";
import { answerHeaders } from "./headers.js";
import type { LegOrderOptions } from "./leg-order.js";
import { nextPiece } from "./next-piece.js";
import { graftAnswer } from "./prompt-graft.js";
import { sumUsage, type Usage } from "./usage.js";

type Fields = Record<string, unknown>;

/** One JSON answer of several: the choices in the order of prompts and copies, the usage summed, the rest the first one's. */
export async function mergeJson(
  { limits, timeouts }: LegOrderOptions,
  exchange: Exchange,
  parts: readonly GatheredPart[],
): Promise<void> {
  const { response, requestId, trail } = exchange;
  const budget = { leftBytes: limits.mergedAnswerLengthBytes };
  const bodies = await Promise.all(parts.map((part) => wholeBody(part, budget, timeouts.stallMs)));
  const [first] = bodies;
  const choices = bodies
    .flatMap((body) => body.choices as Fields[])
    .map((choice, index) => ({ ...choice, index }));
  const usages = bodies.flatMap(({ usage }, at) =>
    usage == null ? [] : [{ usage: usage as Usage, copy: parts[at]?.copy ?? 0 }],
  );
  const merged: Fields = { ...first, id: wholeId(first?.id, parts[0], requestId), choices };
  if (usages.length > 0) merged.usage = sumUsage(usages);
  // They speak of one request, and of blocks that are gone.
  if (parts.length > 1)
    for (const own of ["metrics", "kv_transfer_params"]) if (own in merged) merged[own] = null;
  const text = Buffer.from(JSON.stringify(merged));
  const headers = answerHeaders(parts[0]?.answer.headers ?? {}, requestId);
  headers["content-length"] = text.length;
  response.writeHead(200, headers);
  trail.status = 200;
  trail.answerLengthBytes = text.length;
  response.end(text);
}

/** `cmpl-ID-0` of the first part as `cmpl-ID` of the whole. */
export function wholeId(id: unknown, first: GatheredPart | undefined, requestId: string): unknown {
  return typeof id === "string" && first !== undefined ? id.replace(first.requestId, () => requestId) : id;
}

async function wholeBody(
  part: GatheredPart,
  budget: { leftBytes: number },
  stallMs: number,
): Promise<Fields> {
  const { answer, deadline } = part;
  const { url } = answer.visit.instance;
  const chunks: Uint8Array[] = [answer.held];
  budget.leftBytes -= answer.held.length;
  for (;;) {
    if (budget.leftBytes < 0)
      throw badAnswer("decode", url, "answered with more than limits.mergedAnswerLengthBytes");
    const piece = await nextPiece(answer, deadline, stallMs);
    if (piece === undefined) break;
    chunks.push(piece);
    budget.leftBytes -= piece.byteLength;
  }
  let fields: Fields;
  try {
    fields = JSON.parse(Buffer.concat(chunks).toString("utf8")) as Fields;
  } catch (cause) {
    throw badAnswer("decode", url, "answered 200 with a body that is not JSON", cause);
  }
  choicesOf("decode", url, fields, true);
  return graftAnswer(part.request, fields, answer.promptAnswer);
}
