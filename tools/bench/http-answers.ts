import type { ChildProcess } from "node:child_process";
import { rmSync } from "node:fs";
import { dirname } from "node:path";
import { compileC } from "./c-program.js";
import { firstLine, startOnCore } from "./child-processes.js";

/**
 * `tools/bench/c/http-answers.c`, on the given cores: servers whose answers are made before. Stdin
 * takes its commands.
 */
export interface HttpAnswers {
  readonly child: ChildProcess;
  /** Of each listener. */
  readonly ports: readonly number[];
}

/**
 * Starts a listener for each element. Its answers, whole HTTP messages, are by the end of the
 * request's path.
 */
export async function startHttpAnswers(
  cores: string,
  listeners: readonly Readonly<Record<string, string>>[],
): Promise<HttpAnswers> {
  const program = await compileC("http-answers");
  const child = startOnCore(cores, program, [String(listeners.length)]);
  for (const [listener, answers] of listeners.entries())
    for (const [suffix, text] of Object.entries(answers))
      child.stdin?.write(`answer ${listener} ${suffix} ${Buffer.byteLength(text)}\n${text}`);
  child.stdin?.write("listen\n");
  const ports = (await firstLine(child)).split(" ").map(Number);
  rmSync(dirname(program), { recursive: true });
  return { child, ports };
}

/** An answer in JSON. */
export const jsonAnswer = (body: string) =>
  `HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(body)}\r\n\r\n${body}`;

/** One chunk of a stream. */
export const chunk = (text: string) => `${Buffer.byteLength(text).toString(16)}\r\n${text}\r\n`;

/** The end of a stream. */
export const LAST_CHUNK = "0\r\n\r\n";

/** A stream of events, up to its first chunk. */
export const STREAM_HEAD =
  "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
