import type { ConnectorRequest } from "@kv/interface";
import { schedulerAlone } from "@kv/testing/scheduler-alone";
import { createPushScheduler } from "../../src/index.js";
import type { PushStepMetadata } from "../../src/step-metadata.js";

/** A scheduler side without workers, and the metadata of its next step. */
export async function scheduler() {
  const { scheduler: made, clock } = schedulerAlone(createPushScheduler);
  await made.setHandshakeMetadata([]);
  const step = () => made.buildStepMetadata() as PushStepMetadata;
  return { made, step, clock };
}

export const PREFILL = {
  do_remote_prefill: true,
  remote_engine_id: "p",
  remote_request_id: "cmpl-x",
  remote_host: "p",
  remote_port: 5600,
  tp_size: 1,
};
export const decodeRequest = (requestId = "d1", params: object = PREFILL): ConnectorRequest => ({
  requestId,
  numPromptTokens: 40,
  kvTransferParams: { ...params },
});
export const prefillRequest = (requestId = "p1"): ConnectorRequest => ({
  requestId,
  numPromptTokens: 40,
  kvTransferParams: { do_remote_decode: true },
});
export const BLOCKS = [[4, 5, 6]];
