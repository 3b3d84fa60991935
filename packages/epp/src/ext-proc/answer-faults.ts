import { createHash } from "node:crypto";
import type { Instance } from "@kv/fleet";
import { putLast } from "@kv/fleet/front-end";
import { isGeneration } from "./messages.js";

export interface AnswerHead {
  readonly path: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly status: number;
  readonly contentType: string | undefined;
}

/** A healthy instance may also answer these. */
const REFUSALS: ReadonlySet<number> = new Set([401, 403, 429]);
const MAX_CLIENTS = 1024;

/** Tells an instance's faults from clients' errors. */
export class AnswerFaults {
  /** The last instance that served a client, by a digest of its credentials. */
  readonly #servedBy = new Map<string, Instance>();

  /**
   * `unknown`: the instance refused a client that no other has served, so either may be at fault.
   * The picker cannot try a second instance.
   */
  of(instance: Instance, answer: AnswerHead): "none" | "fault" | "unknown" {
    const { status, headers } = answer;
    if (status >= 500 || (status >= 300 && status < 400)) return "fault";
    if (status < 300) {
      if (hasForeignBody(answer)) return "fault";
      putLast(this.#servedBy, clientOf(headers), instance, MAX_CLIENTS);
      return "none";
    }
    if (!REFUSALS.has(status)) return "none";
    const server = this.#servedBy.get(clientOf(headers));
    return server === undefined || server === instance ? "unknown" : "fault";
  }
}

function hasForeignBody({ path, contentType = "" }: AnswerHead): boolean {
  if (contentType.startsWith("text/html")) return true;
  return isGeneration(path) && !/^$|json|^text\/event-stream/.test(contentType);
}

function clientOf(headers: AnswerHead["headers"]): string {
  const credentials = `${headers.authorization} ${headers["x-api-key"]}`;
  return createHash("sha256").update(credentials).digest("base64");
}
