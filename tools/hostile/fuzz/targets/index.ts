import type { FuzzTarget } from "../target.js";
import { eventStream, instanceBody, requestBody, transferParams } from "./http.js";
import { planDocument } from "./plan.js";
import { handshake, kvEvents, leaseQuery, notifications } from "./wire.js";
import { zmtp } from "./zmtp.js";

/** A folder of `corpus` has the name of its target. */
export const TARGETS: Readonly<Record<string, FuzzTarget>> = {
  "event-stream": eventStream,
  handshake,
  "instance-body": instanceBody,
  "kv-events": kvEvents,
  "lease-query": leaseQuery,
  notifications,
  "plan-document": planDocument,
  "request-body": requestBody,
  "transfer-params": transferParams,
  zmtp,
};
