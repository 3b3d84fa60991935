import { createServer, type RequestListener } from "node:http";
import { createServer as createTlsServer } from "node:https";
import type { AddressInfo } from "node:net";

export interface ObjectStore {
  readonly port: number;
  /** Objects by path: bucket and key. */
  readonly objects: Map<string, Buffer>;
  /** Answers each request with 403. */
  refuses: boolean;
  /** Answers the next request for this path with 403. */
  refuseOnce(path: string): void;
  close(): Promise<void>;
}

/**
 * The part of S3 that transfers use: PUT of an object, GET of a range. Signatures are not checked.
 * With `tls` it speaks HTTPS only.
 */
export async function startObjectStore(tls?: { key: string; cert: string }): Promise<ObjectStore> {
  const objects = new Map<string, Buffer>();
  let refused = "";
  const answer: RequestListener = async (request, response) => {
    const path = decodeURIComponent(new URL(request.url ?? "", "http://store").pathname);
    const body = Buffer.concat(await request.toArray());
    if (store.refuses || path === refused) {
      refused = "";
      response.writeHead(403, { "content-type": "application/xml" });
      response.end("<Error><Code>AccessDenied</Code><Message>no</Message></Error>");
      return;
    }
    if (request.method === "PUT") {
      objects.set(path, body);
      response.writeHead(200, { etag: '"1"' }).end();
      return;
    }
    const object = objects.get(path);
    const [, first, last] = /^bytes=(\d+)-(\d+)$/.exec(request.headers.range ?? "") ?? [];
    if (
      request.method !== "GET" ||
      object === undefined ||
      first === undefined ||
      last === undefined
    ) {
      response.writeHead(404, { "content-type": "application/xml" });
      response.end("<Error><Code>NoSuchKey</Code><Message>there is none</Message></Error>");
      return;
    }
    const part = object.subarray(Number(first), Number(last) + 1);
    const range = `bytes ${first}-${Number(first) + part.length - 1}/${object.length}`;
    response.writeHead(206, { "content-range": range, "content-length": part.length }).end(part);
  };
  const server = tls === undefined ? createServer(answer) : createTlsServer(tls, answer);
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const store: ObjectStore = {
    port: (server.address() as AddressInfo).port,
    objects,
    refuses: false,
    refuseOnce: (path) => {
      refused = path;
    },
    close: () =>
      new Promise((resolve) => {
        server.close(() => resolve());
        server.closeAllConnections();
      }),
  };
  return store;
}

/** The backend of a store at a port of this host. */
export const objectBackend = (
  port: number,
  more: Readonly<Record<string, string>> = { scheme: "http" },
) => ({
  name: "OBJ",
  parameters: {
    endpoint_override: `${more["scheme"]}://127.0.0.1:${port}`,
    bucket: "kv",
    region: "us-east-1",
    access_key: "any",
    secret_key: "any",
    // Bodies without chunks and trailing checksums.
    req_checksum: "required",
    ...more,
  },
});
