import { EventEmitter } from "node:events";
import type { IncomingMessage, ServerResponse } from "node:http";
import type { Socket } from "node:net";
import { expect, test } from "vitest";
import { ClientConnections, MemberList } from "./client-connections.js";

/** A socket of a remote address. */
function socketOf(remoteAddress: string): Socket {
  const socket = Object.assign(new EventEmitter(), {
    remoteAddress,
    destroyed: false,
    bytesRead: 0,
  });
  return socket as unknown as Socket;
}

function connectionsOf(limits: { connections?: number; connectionsPerAddress?: number } = {}) {
  const refused: { readonly from: string | undefined; readonly status: unknown }[] = [];
  const connections = new ClientConnections({
    limits: { connections: 10, connectionsPerAddress: 2, pipelinedRequests: 1, ...limits },
    refuse: (socket, { details }) =>
      refused.push({ from: socket.remoteAddress, status: details["httpStatus"] }),
  });
  /** Opens a connection; `busy`: with a request. */
  const open = (address: string, busy = false) => {
    const socket = socketOf(address);
    const taken = connections.accept(socket);
    if (busy) connections.received(socket);
    return { socket, taken };
  };
  return { connections, refused, open };
}

test("an IPv6 /64 is one client, and an IPv4 address that is written as IPv6 is the IPv4 address", () => {
  const { open, refused } = connectionsOf();
  const busy = ["2001:db8:0:1::1", "2001:db8:0:1:ffff::2", "::ffff:10.0.0.1", "10.0.0.1"];
  for (const address of busy) expect(open(address, true).taken, address).toBe(true);
  expect(open("2001:db8:0:1:1:2:3:4").taken).toBe(false);
  expect(open("10.0.0.1").taken).toBe(false);
  expect(open("2001:db8:0:2::1").taken).toBe(true);
  expect(refused.map(({ status }) => status)).toEqual([429, 429]);
});

test("a new connection takes the place of the oldest idle one: of its address, or of the address with most", () => {
  const { open, refused } = connectionsOf({ connections: 4, connectionsPerAddress: 3 });
  for (const address of ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.2"]) open(address);
  expect(open("10.0.0.3").taken).toBe(true);
  expect(refused).toEqual([{ from: "10.0.0.2", status: 503 }]);
  expect(open("10.0.0.2").taken).toBe(true);
  // The address has its most again, so its own oldest one goes.
  expect(open("10.0.0.2").taken).toBe(true);
  expect(refused.slice(1).map(({ from }) => from)).not.toContain("10.0.0.3");
});

test("a connection with a request keeps its place until its answer has ended", () => {
  const { connections, open } = connectionsOf({ connections: 1 });
  const { socket } = open("10.0.0.1");
  const response = Object.assign(new EventEmitter(), { headersSent: false });
  let served = 0;
  const request = { socket } as IncomingMessage;
  connections.takeTurn(request, response as unknown as ServerResponse, () => {
    served += 1;
  });
  connections.received(socket);
  expect(open("10.0.0.2").taken).toBe(false);
  response.emit("close");
  expect(open("10.0.0.2").taken).toBe(true);
  expect(served).toBe(1);
});

test("requests that are sent ahead wait, and one too many ends the connection", () => {
  const { connections, open, refused } = connectionsOf();
  const { socket } = open("10.0.0.1");
  const served: number[] = [];
  const send = (at: number) =>
    connections.takeTurn(
      { socket } as IncomingMessage,
      new EventEmitter() as unknown as ServerResponse,
      () => served.push(at),
    );
  for (const at of [0, 1, 2, 3]) send(at);
  expect(served).toEqual([0]);
  expect(refused.map(({ status }) => status)).toEqual([429]);
});

test("a list keeps the order of joining", () => {
  const list = new MemberList<string>();
  const [first, second, third] = ["a", "b", "c"].map((value) => list.join(value));
  expect([list.oldest, list.size, list.values()]).toEqual(["a", 3, ["a", "b", "c"]]);
  if (second !== undefined) list.leave(second);
  expect(list.values()).toEqual(["a", "c"]);
  if (first !== undefined) list.leave(first);
  list.join("d");
  expect([list.oldest, list.values()]).toEqual(["c", ["c", "d"]]);
  if (third !== undefined) list.leave(third);
  expect(list.values()).toEqual(["d"]);
});

test("a list lets go of a member that leaves, which leaves once", () => {
  const list = new MemberList<string>();
  list.join("a");
  const member = list.join("b");
  list.join("c");
  list.leave(member);
  list.leave(member);
  expect(member).toEqual({ value: undefined, before: undefined, after: undefined });
  expect([list.size, list.values()]).toEqual([2, ["a", "c"]]);
});

test("a list is empty when all have left", () => {
  const list = new MemberList<number>();
  for (const member of [1, 2, 3].map((value) => list.join(value))) list.leave(member);
  expect([list.size, list.oldest, list.values()]).toEqual([0, undefined, []]);
});
