import { nixlTransport, hostMemory, sharedMemory } from "@kv/nixl";
const t = nixlTransport({ library: process.env.LIB, backends: ["UCX"] });
const a = await t.createAgent({ captureTelemetry: true }); const b = await t.createAgent();
const B = 4096, N = 64; const m = t.allocate(B * N), n = t.allocate(B * N);
const rm = await a.register(m); await b.register(n);
await a.addRemote(await b.localMetadata());
const rows = (x: any, c = N) => ({ memoryType: "DRAM" as const, rows: Float64Array.of(x.address, B, 0, B, c) });
const l = await a.prepareLocal(rows(m)), r = await a.prepareRemote(b.name, rows(n));
const p = await a.prepareTransfer({ operation: "READ", local: l, localIds: Int32Array.of(5, 1), remote: r, remoteIds: Int32Array.of(5, 1) });
for (const v of [1, 2, 3]) { n.bytes.fill(v); const res = await p.post(v === 2 ? { notification: Buffer.from("hi") } : {}).done; console.log(res, m.bytes[5 * B]); }
console.log(await p.estimateCost()); 
await l.close().catch((e) => console.log(e.code)); await p.close();
const lo = await a.prepareRemote(a.name, rows(m)); m.bytes.fill(9, 0, B);
console.log(await a.transfer({ operation: "READ", local: l, runs: Int32Array.of(9, 0, 1), remote: lo, notification: Buffer.from("me") }).done, m.bytes[9 * B]);
for await (const x of a.notifications()) { console.log(x.from === a.name, Buffer.from(x.payload).toString()); break; }
console.log(await a.pluginParameters("UCX"), await a.backendParameters("UCX"));
const s = sharedMemory(new SharedArrayBuffer(B * N)); const rs = await a.register(s);
const ls = await a.prepareLocal(rows(s)); n.bytes.fill(123); await a.transfer({ operation: "READ", local: ls, runs: Int32Array.of(0, 0, N), remote: r }).done; console.log(s.bytes[100]);
await ls.close(); await rs.close(); s.close();
await a.register(hostMemory({ address: 4096, lengthBytes: 10, owner: {} })).catch((e) => console.log(e.message));
await b.localMetadata({ registrations: [] }).then((x) => console.log(x.length));
await a.addBackend("UCX").catch((e) => console.log(e.message));
if (!process.env.LIB) { await a.addBackend("POSIX"); console.log(a.backends, await a.queryMemory({ backend: "POSIX", memoryType: "FILE", keys: ["/etc/hostname", "/nope"] }));
 const h = t.allocate(B); await a.register(h, { backends: ["POSIX"] }); }
await t.close(); console.log("closed");
