"""What both adapters share."""
