import { type FailureStage, failureStage, type Role } from "./upstream.js";

export interface FailedAttempt {
  readonly role: Role;
  readonly error: unknown;
  readonly stage: FailureStage | undefined;
  /** 1 for the first. Those that never left the proxy do not count. */
  readonly attempt: number;
}

/** Says whether a leg may be tried on another instance. It is asked only while nothing has left for the client, and where there is one. */
export interface RetryPolicy {
  again(failed: FailedAttempt): boolean;
  /** A decode leg failed that may have begun: may the part begin again at prefill, with blocks of its own? `attempt` counts parts. */
  afresh(failed: FailedAttempt): boolean;
}

/**
 * Nothing sent: another instance, as long as there is one. A prefill leg that broke off, or was answered with a failure of the server's:
 * one more try, as all it leaves behind is blocks under a lease (one, so that a request that kills its worker does not go round). A
 * decode leg that did: never with the same blocks, as its worker may have told the prefill worker to free them; once from prefill on.
 */
export const retryWhereSafe: RetryPolicy = {
  again({ role, stage, attempt }) {
    if (stage === "connect") return true;
    return role === "prefill" && stage !== undefined && attempt === 1;
  },
  afresh: ({ stage, attempt }) => stage !== undefined && stage !== "connect" && attempt === 1,
};

export function failedAttempt(role: Role, error: unknown, attempt: number): FailedAttempt {
  return { role, error, stage: failureStage(error), attempt };
}
