import { EventEmitter } from "node:events";
import type { ServerResponse } from "node:http";
import type { BodyQueue } from "@kv/fleet/front-end";
import { Deadline, parseGenerationRequest } from "@kv/fleet/front-end";
import { KvError, systemClock } from "@kv/interface";
import { expect, test } from "vitest";
import { RequestRecord } from "../telemetry/request-record.js";
import { type AnswerTarget, type LegAnswer, streamResponse } from "./leg-answer.js";

function setUp(pieces: readonly string[]) {
  let asked = 0;
  const ended: string[] = [];
  const sent: string[] = [];
  const response = Object.assign(new EventEmitter(), {
    full: false,
    writeHead() {},
    write: (chunk: Uint8Array) => {
      sent.push(Buffer.from(chunk).toString());
      return !response.full;
    },
    end: () => sent.push("END"),
  });
  const deadline = new Deadline({ clock: systemClock(), requestMs: 60_000 });
  const client: AnswerTarget = {
    requestId: "r",
    request: parseGenerationRequest("/v1/completions", Buffer.from("{}")),
    response: response as unknown as ServerResponse,
    deadline,
    record: new RequestRecord(),
    eventStreamStarted: false,
  };
  const answer: LegAnswer = {
    visit: {
      instance: { role: "decode", url: "http://d", inFlight: 1 },
      succeeded: () => ended.push("succeeded"),
      abandoned: () => ended.push("abandoned"),
      failed: (error) => ended.push(error.code),
    },
    status: 200,
    headers: {},
    eventStream: false,
    kvFromPrefill: false,
    onePart: true,
    held: Buffer.from("held"),
    rest: {
      next: async () => {
        const value = pieces[asked++];
        return value === undefined
          ? { done: true, value }
          : { done: false, value: Buffer.from(value) };
      },
    } as BodyQueue,
    discard: () => ended.push("discarded"),
  };
  return {
    response,
    deadline,
    sent,
    ended,
    asked: () => asked,
    done: streamResponse(client, answer, 60_000),
  };
}

/** Waits until every promise that can settle has settled. */
const settle = () => new Promise((resolve) => setImmediate(() => setImmediate(resolve)));

test("reads nothing more from the instance while the client does not read", async () => {
  const { response, sent, ended, asked, done } = setUp(["one", "two"]);
  response.full = true;
  await settle();
  expect([sent, asked()]).toEqual([["held"], 0]);
  response.full = false;
  response.emit("drain");
  await done;
  expect(sent).toEqual(["held", "one", "two", "END"]);
  expect(ended).toEqual(["succeeded"]);
});

test("an abort while the client does not read ends the wait and closes the instance's connection", async () => {
  const { response, deadline, ended, done } = setUp(["one", "two"]);
  response.full = true;
  await settle();
  deadline.abort(new KvError("KV_REQUEST_ABORTED", "gone"));
  await expect(done).rejects.toMatchObject({ code: "KV_REQUEST_ABORTED" });
  expect(ended).toEqual(["discarded", "abandoned"]);
});
