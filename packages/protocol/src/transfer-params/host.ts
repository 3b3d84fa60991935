/** A host name or an IP address and nothing else: ZMQ gives "*", ";" and "/" in an endpoint a meaning. */
export const HOST = /^[A-Za-z0-9]([A-Za-z0-9._-]{0,253})$|^[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9]{1,16})?$/;
