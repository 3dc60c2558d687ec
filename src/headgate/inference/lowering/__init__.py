"""From a network with gates to a graph of operators that leaves out what is closed: `compact` hands itself to it."""
