import type { IncomingMessage } from "node:http";
import { KvError } from "@kv/interface";

/**
 * Reads a JSON body. Errors: `KV_REQUEST_INVALID` with the HTTP status 413 or 415; the rest of the body is then unread, so the connection cannot
 * be used again. `KV_REQUEST_ABORTED` when the client disconnects.
 */
export function readJsonBody(request: IncomingMessage, limitBytes: number): Promise<Uint8Array> {
  const type = request.headers["content-type"];
  if (type === undefined || !/^application\/json\s*(;|$)/i.test(type)) return Promise.reject(wrongType(type));
  if (Number(request.headers["content-length"] ?? 0) > limitBytes)
    return Promise.reject(tooLarge(limitBytes));
  return new Promise((resolve, reject) => {
    const chunks: Buffer[] = [];
    let lengthBytes = 0;
    request.on("data", (chunk: Buffer) => {
      lengthBytes += chunk.length;
      if (lengthBytes > limitBytes) {
        request.removeAllListeners("data");
        reject(tooLarge(limitBytes));
      } else chunks.push(chunk);
    });
    request.once("end", () => resolve(chunks.length === 1 && chunks[0] ? chunks[0] : Buffer.concat(chunks)));
    request.once("error", (cause) => {
      reject(
        new KvError("KV_REQUEST_ABORTED", "the client disconnected while it sent its request", { cause }),
      );
    });
  });
}

function wrongType(type: string | undefined): KvError {
  return new KvError("KV_REQUEST_INVALID", `the content type of the body is ${type ?? "missing"}, not JSON`, {
    hint: "send content-type: application/json",
    details: { httpStatus: 415 },
  });
}

function tooLarge(limitBytes: number): KvError {
  return new KvError("KV_REQUEST_INVALID", `the body is larger than ${limitBytes} bytes`, {
    hint: "the limit is set by limits.bodyLengthBytes, or --body-limit-bytes",
    details: { httpStatus: 413 },
  });
}
