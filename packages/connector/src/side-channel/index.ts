export * from "./zmq.js";
