import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type EtcdTls, etcdMetadata, type NixlAgent, nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type Certificate, makeCertificate } from "../support/certificates.js";
import { type Etcd, etcdMissing, skipsEtcd, startEtcd } from "../support/etcd.js";
import { objectRoundTrip } from "../support/object-round-trip.js";
import { type ObjectStore, startObjectStore } from "../support/object-store.js";
import { objMissing } from "../support/plugins.js";

const missing = nixlMissing ?? etcdMissing;
const ROUNDS = 20;

describe.skipIf(nixlMissing !== undefined || skipsEtcd)(
  `etcd over TLS (${missing ?? "found"})`,
  () => {
    const transport = nixlTransport({ backends: ["UCX"] });
    let folder = "";
    let etcd: Etcd;
    let tls: EtcdTls;
    let one: NixlAgent;
    let two: NixlAgent;
    let server: Certificate;
    let stranger: Certificate;
    const read = (path: string) => readFileSync(path, "utf8");

    beforeAll(async () => {
      folder = mkdtempSync(join(tmpdir(), "kv-nixl-tls-"));
      const authority = makeCertificate(folder, "authority");
      server = makeCertificate(folder, "server", authority);
      const client = makeCertificate(folder, "client", authority);
      stranger = makeCertificate(folder, "stranger");
      etcd = await startEtcd({ tls: { ca: authority.cert, ...server } });
      tls = { ca: read(authority.cert), cert: read(client.cert), key: read(client.key) };
      one = await transport.createAgent({ name: "one" });
      two = await transport.createAgent({ name: "two" });
    }, 60_000);
    afterAll(async () => {
      await transport.close();
      await etcd?.end();
      rmSync(folder, { recursive: true, force: true });
    });

    const open = (agent: NixlAgent, certificates: EtcdTls | undefined) =>
      etcdMetadata(agent, { endpoints: [etcd.url], leaseSeconds: 2, tls: certificates });
    const meet = async () => {
      await using mine = open(one, tls);
      await using theirs = open(two, tls);
      await theirs.publish();
      expect(await mine.fetch("two")).toBe("two");
      await one.notify("two", Buffer.from("found"));
      await one.removeRemote("two");
    };

    test("agents find one another", meet);

    test.each([
      ["no certificate", () => ({ ca: tls.ca })],
      [
        "a certificate of another authority",
        () => ({ ...tls, cert: read(stranger.cert), key: read(stranger.key) }),
      ],
      ["another authority's trust", () => ({ ...tls, ca: read(stranger.cert) })],
      ["Node's authorities", () => undefined],
    ])("a client is refused with %s", async (_name, certificates) => {
      const mine = open(one, certificates());
      await expect(mine.publish()).rejects.toMatchObject({ code: "KV_SIDE_CHANNEL_UNREACHABLE" });
      await mine.close();
    });

    // NIXL's libraries bind some symbols of OpenSSL to Node's own. Here Node serves and requests with
    // TLS, while NIXL's SDK requests with it.
    test.skipIf(objMissing)(
      `at the same time as NIXL's HTTPS to an object store (${objMissing ?? "OBJ found"})`,
      { timeout: 120_000 },
      async () => {
        const certificate = makeCertificate(folder, "store");
        const store: ObjectStore = await startObjectStore({
          key: read(certificate.key),
          cert: read(certificate.cert),
        });
        const objects = objectRoundTrip(store.port, certificate.cert, ROUNDS);
        for (let round = 0; round < ROUNDS; round++) await meet();
        expect(await objects).toBe(true);
        await meet();
        await store.close();
      },
    );
  },
);
