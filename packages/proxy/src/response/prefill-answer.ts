import type { Instance } from "@kv/fleet";
import type { GenerationRequest, UpstreamAnswer } from "@kv/fleet/front-end";
import { checkRemotePrefillParams } from "@kv/protocol";
import { rawMember } from "../request/json-members.js";
import { badAnswer } from "../upstream/upstream-errors.js";
import { endedVisit, type LegAnswer } from "./leg-answer.js";

type Fields = Readonly<Record<string, unknown>>;

/** How a prefill leg ended. */
export type PrefillOutcome = PrefilledKv | PrefillWithoutKv | PrefillError;

/** The prompt is computed, and a decode worker can get its KV. */
export interface PrefilledKv {
  readonly kind: "kv";
  readonly instance: Instance;
  /** JSON text of the parameters by which a decode worker finds the KV. */
  readonly kvTransferParams: string;
  /** The whole answer. */
  readonly fields: Fields;
  /** When the answer was there, on the proxy's clock. The lease of the blocks began before. */
  readonly atMs: number;
}

/** The prompt is computed, but the worker keeps no KV for a decode worker. */
export interface PrefillWithoutKv {
  readonly kind: "no-kv";
  readonly instance: Instance;
}

/** The worker answered with an error, which is for the client. */
export interface PrefillError {
  readonly kind: "error";
  readonly instance: Instance;
  readonly answer: LegAnswer;
}

/** Reads a prefill worker's complete answer. Errors: `KV_PROXY_UPSTREAM_FAILED` for an answer that no decode worker could use. */
export function readPrefillAnswer(
  instance: Instance,
  answer: UpstreamAnswer,
  body: Buffer,
  atMs: number,
): PrefillOutcome {
  const { url } = instance;
  const { status, headers, discard } = answer;
  if (status >= 400) {
    const visit = endedVisit(instance);
    const error = { visit, status, headers, eventStream: false, onePart: true, held: body, rest: undefined };
    return { kind: "error", instance, answer: { ...error, discard } };
  }
  if (status !== 200)
    throw badAnswer("prefill", url, `answered with status ${status}, which the proxy does not follow`);
  const text = body.toString("utf8");
  const fields = parseObject(url, text, body.length);
  const { kv_transfer_params: params } = fields;
  // With any other value than `true`, a decode worker would compute the prompt itself without an error.
  const hasKv =
    typeof params === "object" &&
    params !== null &&
    "do_remote_prefill" in params &&
    params.do_remote_prefill === true;
  const kvTransferParams = hasKv ? rawMember(text, "kv_transfer_params") : undefined;
  if (kvTransferParams === undefined) return { kind: "no-kv", instance };
  const problem = checkRemotePrefillParams(params as Fields);
  if (problem !== undefined)
    throw badAnswer(
      "prefill",
      url,
      `answered kv_transfer_params that no decode worker could use: ${problem.message}`,
    );
  return { kind: "kv", instance, kvTransferParams, fields, atMs };
}

/** A decode worker's answer, with the prefill worker's where the client is to get log probabilities of the prompt. */
export function withPromptAnswer(
  answer: LegAnswer,
  { promptFields }: GenerationRequest,
  { fields }: PrefilledKv,
): LegAnswer {
  return promptFields === "none" || answer.status !== 200 ? answer : { ...answer, promptAnswer: fields };
}

function parseObject(url: string, text: string, lengthBytes: number): Fields {
  let fields: unknown;
  try {
    fields = JSON.parse(text);
  } catch (cause) {
    const problem = `answered 200 with a body that is not JSON (${lengthBytes} bytes)`;
    throw badAnswer("prefill", url, problem, cause);
  }
  if (typeof fields !== "object" || fields === null || Array.isArray(fields))
    throw badAnswer("prefill", url, "answered 200 with JSON that is not an object");
  return fields as Fields;
}
