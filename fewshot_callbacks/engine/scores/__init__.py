"""The exact score of a pair, and fast products that approximate it with a proved bound."""
